"""Measurement of a graph's layers, in order, on one device.

    layer 1   copy state ─ run ─ measure ─ free state
    layer 2                                           copy state ─ run ─ measure ─ ...

The device holds one layer's state at a time, and the values that later layers still read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.capture import autocast
from placer.capture.layers import Layer, LayerGraph, tensor_bytes
from placer.errors import ProfilingError
from placer.optimizers import OptimizerState
from placer.profiler.cache.layer_cache import Remembered, layers_to_run
from placer.profiler.measurement import Measurement
from placer.profiler.memory import measure_memory
from placer.profiler.progress import Step
from placer.profiler.timing import measure_step, measure_time
from placer.profiler.trial import Trial, bring_input, bring_state
from placer.utils.error_translation import ErrorTranslation
from placer.utils.units import bytes_text

__all__ = ["Measurement", "measure_layers", "measure_trial", "ran_out"]

# Timings of an optimizer's step: few suffice, because it has no data-dependent kernels.
_STEPS = 3


def measure_layers(
    graph: LayerGraph,
    inputs: Sequence[Any],
    device: torch.device,
    training: bool,
    repeats: int,
    step: Step,
    optimizer: OptimizerState | None = None,
    remembered: Remembered | None = None,
) -> list[Measurement]:
    """Measure every layer of a graph on one device; layers with equal signatures once.

    The device holds the state of one layer at a time, and the values that later layers still read.
    Known layers are not measured again, and do not run unless a measured layer needs their results.

    Args:
        graph: the layers.
        inputs: the model's inputs, in the order of ``graph.inputs``; inputs on ``meta`` become
            random tensors.
        device: where the layers run.
        training: whether backward passes are measured.
        repeats: how often each pass is timed.
        step: called with the name of each layer when its measurement begins.
        optimizer: the optimizer whose step is measured, in training; None (default) for none.
        remembered: known measurements; each new one is added immediately.

    Returns:
        One measurement for each layer, in order.

    Raises:
        ProfilingError: if a layer failed or did not fit; the message names it.
    """
    remembered = remembered or Remembered()
    missing = {layer.name for layer in remembered.missing(graph.layers)}
    running = layers_to_run(graph, (graph[name] for name in missing))
    brought = zip(graph.inputs, inputs, strict=True)
    values = {name: bring_input(value, device) for name, value in brought} if running else {}
    last_reader = {name: index for index, layer in enumerate(graph.layers) for name in layer.reads}
    for index, layer in enumerate(graph.layers):
        if layer.name not in running:
            continue
        with ErrorTranslation(partial(_blamed, layer, graph, device)), devices.current(device):
            state = bring_state(layer, graph.state, device)
            reads = [values[name] for name in layer.reads]
            writes, mutated = _values(layer, device, state, reads)
            if layer.name in missing:
                step(layer.name)
                trial = Trial(layer, device, state, reads, graph.values, training, mutated)
                measured = measure_trial(trial, training, repeats)
                if training and optimizer is not None:
                    step_ms = _step_ms(trial, _trained(graph, layer), optimizer, repeats)
                    measured = replace(measured, optimizer_ms=step_ms)
                remembered.put(layer, measured)
                del trial
        # real results for later layers, whose kernels may depend on values
        values.update(zip(layer.writes, writes, strict=True))
        # free values after their last reader
        _drop_read(values, layer, index, last_reader)
        del state, reads, writes
    devices.release_cache()
    return [known for layer in graph.layers if (known := remembered.get(layer)) is not None]


def _values(
    layer: Layer, device: torch.device, state: Sequence[Tensor], reads: Sequence[Any]
) -> tuple[tuple[Any, ...], list[int]]:
    """Return the layer's writes, and the positions of the reads that it changes in place."""
    versions = [read._version if isinstance(read, Tensor) else 0 for read in reads]
    with torch.no_grad():
        writes = tuple(layer.function(device, state, reads))
    mutated = [
        i
        for i, read in enumerate(reads)
        if isinstance(read, Tensor) and read._version != versions[i]
    ]
    return writes, mutated


def measure_trial(trial: Trial, training: bool, repeats: int) -> Measurement:
    """Measure time and memory of a layer's passes, for a layer that has not run yet.

    Args:
        trial: the layer.
        training: whether its backward pass is measured.
        repeats: how often each pass is timed.
    """
    # autocast caches casted weights; a recording would lack the casts cached by an earlier pass
    with autocast.uncached(trial.device):
        trial.forward()  # the first run selects kernels and allocates workspaces
        if training:
            trial.backward()
        write_bytes = tuple(
            tensor_bytes(write) if isinstance(write, Tensor) else 0 for write in trial.writes
        )
        memory = measure_memory(trial, training)
        time = measure_time(trial, training, repeats, halves=memory.deferred_bytes > 0)
        return Measurement(time, memory, write_bytes)


def _step_ms(
    trial: Trial, parameters: Sequence[Tensor], optimizer: OptimizerState, repeats: int
) -> float | None:
    """Return the step time of the optimizer on the layer's parameters, in ms.

    None if it cannot be measured.
    """
    if optimizer.name is None:
        return None
    if not trial.parameters:
        return 0.0
    try:
        with torch.enable_grad():
            return measure_step(
                trial, optimizer.step(parameters, trial.parameters), min(repeats, _STEPS)
            )
    except Exception:
        # a user's optimizer may raise anything, or its state may not fit: measure the rest
        return None


def ran_out(error: Exception) -> bool:
    """Return whether an error reports a lack of memory.

    For host memory, torch raises a RuntimeError that only its text identifies.
    """
    return isinstance(
        error, (torch.OutOfMemoryError, MemoryError)
    ) or "can't allocate memory" in str(error)


def _blamed(
    layer: Layer, graph: LayerGraph, device: torch.device, error: BaseException
) -> BaseException:
    """Return a ProfilingError that names the layer and, for lack of memory, its needs."""
    if not isinstance(error, Exception):
        return error
    lines = str(error).splitlines() or [""]
    if ran_out(error):
        state = bytes_text(sum(tensor_bytes(graph.state[name]) for name in layer.state))
        read = bytes_text(sum(graph.values[name].bytes for name in layer.reads))
        written = bytes_text(sum(graph.values[name].bytes for name in layer.writes))
        text = (
            f"layer {layer.name!r} does not fit on {device}: its state takes {state}, its "
            f"inputs {read}, its results {written}, in addition to saved tensors; choose a finer "
            f"granularity or a smaller batch ({lines[0]})"
        )
    else:
        text = (
            f"layer {layer.name!r} failed on {device}: {type(error).__name__}: {lines[0]}"
            f"{_given(layer, graph)}"
        )
    blamed = ProfilingError(text)
    blamed.__cause__ = error
    return blamed


def _given(layer: Layer, graph: LayerGraph) -> str:
    """Return a note on the example inputs that a layer reads, which may be the cause.

    Capture does not run kernels, so invalid input values fail only here.
    """
    read = [
        graph.values[name]
        for name in graph.inputs
        if name in layer.reads and graph.values[name].dtype is not None
    ]
    told = [
        f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}" for value in read
    ]
    if not told:
        return ""
    return (
        f"; it reads the example inputs: {', '.join(told)}. Give inputs with which the model itself"
        " runs"
    )


def _trained(graph: LayerGraph, layer: Layer) -> list[torch.Tensor]:
    return [graph.state[name] for name in layer.state if graph.state[name].requires_grad]


def _drop_read(
    values: dict[str, Any], layer: Layer, index: int, last_reader: Mapping[str, int]
) -> None:
    """Remove the values of a layer, the ``index``-th, that no later layer reads."""
    for name in (*layer.reads, *layer.writes):
        if last_reader.get(name, -1) <= index:
            values.pop(name, None)
