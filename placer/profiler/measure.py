"""Runs the layers of a graph in order on one device, each with its state alone, and measures those not seen before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.errors import ProfilingError
from placer.graph.layers import Layer, LayerGraph, tensor_bytes
from placer.profiler.memory import LayerMemory, measure_memory
from placer.profiler.progress import Step
from placer.profiler.timing import LayerTime, measure_time
from placer.profiler.trial import Trial, bring_input, bring_state


@dataclass(frozen=True)
class Measurement:
    """What was measured of one layer on one type of device."""

    time: LayerTime
    memory: LayerMemory


def measure_layers(
    graph: LayerGraph, inputs: Sequence[Any], device: torch.device, training: bool, repeats: int, step: Step
) -> list[Measurement]:
    """Measure every layer of a graph on one device; layers with the same signature once.

    The device holds one layer's state at a time, and the values that later layers still read.

    Args:
        graph: the layers.
        inputs: what the model is given, in the order of ``graph.inputs``; those on ``meta`` become random tensors.
        device: where the layers run.
        training: whether backward passes are measured.
        repeats: how often each pass is timed.
        step: told the name of each layer as it begins.

    Returns:
        One measurement for each layer, in their order.

    Raises:
        ProfilingError: a layer failed or did not fit; the message names it.
    """
    values = {name: bring_input(value, device) for name, value in zip(graph.inputs, inputs, strict=True)}
    last_reader = {name: index for index, layer in enumerate(graph.layers) for name in layer.reads}
    seen: dict[str, Measurement] = {}
    results = []
    for index, layer in enumerate(graph.layers):
        step(layer.name)
        with _blaming(layer, graph, device), devices.current(device):
            state = bring_state(layer, graph.state, device)
            reads = [values[name] for name in layer.reads]
            writes, mutated = _values(layer, device, state, reads)
            if layer.signature not in seen:
                trial = Trial(layer, device, state, reads, graph.values, training, mutated)
                seen[layer.signature] = _measure(trial, training, repeats)
                del trial
        results.append(seen[layer.signature])
        values.update(zip(layer.writes, writes, strict=True))
        done = {name for name in (*layer.reads, *layer.writes) if last_reader.get(name, -1) <= index}
        values = {name: value for name, value in values.items() if name not in done}
        del state, reads, writes
    devices.release_cache()
    return results


def _values(
    layer: Layer, device: torch.device, state: Sequence[Tensor], reads: Sequence[Any]
) -> tuple[tuple[Any, ...], list[int]]:
    """What the layer writes, and the positions of those reads that it changes in place."""
    versions = [read._version if isinstance(read, Tensor) else 0 for read in reads]
    with torch.no_grad():
        writes = tuple(layer.function(device, state, reads))
    mutated = [i for i, read in enumerate(reads) if isinstance(read, Tensor) and read._version != versions[i]]
    return writes, mutated


def _measure(trial: Trial, training: bool, repeats: int) -> Measurement:
    trial.forward()  # libraries choose kernels and take their workspaces
    if training:
        trial.backward()
    memory = measure_memory(trial, training)
    return Measurement(measure_time(trial, training, repeats), memory)


@contextmanager
def _blaming(layer: Layer, graph: LayerGraph, device: torch.device) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        lines = str(error).splitlines() or [""]
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in lines[0]:
            state = sum(tensor_bytes(graph.state[name]) for name in layer.state)
            read = sum(graph.values[name].bytes for name in layer.reads)
            written = sum(graph.values[name].bytes for name in layer.writes)
            raise ProfilingError(
                f"layer {layer.name!r} does not fit on {device}: its state takes {state} bytes, what it reads {read}, "
                f"what it writes {written}, beside what it keeps; "
                f"cut the model finer or take a smaller batch ({lines[0]})"
            ) from error
        raise ProfilingError(f"layer {layer.name!r} failed on {device}: {type(error).__name__}: {lines[0]}") from error
