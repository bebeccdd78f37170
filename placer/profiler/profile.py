"""From a model and example inputs to its profile: capture, measure, write down."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, overload

import torch
from torch import Tensor, nn

from placer import schema
from placer.devices import DeviceLike, keep_random_state, resolve, type_name, unobserved
from placer.errors import InputError, ProfilingError
from placer.graph.capture import capture
from placer.graph.granularity import Granularity
from placer.graph.layers import Layer, LayerGraph, tensor_bytes
from placer.profiler import inputs
from placer.profiler.cache import Cache, CacheLike, open_cache
from placer.profiler.cluster import MemoryLimit, measure, resolve_limits
from placer.profiler.conditions import conditions, optimizer_facts
from placer.profiler.graphs import KnownGraphs
from placer.profiler.links import links_to_measure
from placer.profiler.measure import Measurement, measure_layers
from placer.profiler.optimizer import OptimizerLike, OptimizerState
from placer.profiler.progress import Shown, progress_bar
from placer.profiler.remembered import Remembered
from placer.profiler.timing import significant

_log = logging.getLogger(__name__)


@overload
def profile(
    model: nn.Module,
    example_inputs: Any,
    devices: int | Sequence[DeviceLike] | None = None,
    *,
    training: bool = True,
    optimizer: OptimizerLike = "adam",
    granularity: Granularity = "auto",
    progress: Shown = True,
    repeats: int = 10,
    memory_bytes: MemoryLimit = None,
    cache: CacheLike = True,
    batch_sizes: None = None,
) -> schema.Profile: ...


@overload
def profile(
    model: nn.Module,
    example_inputs: Any,
    devices: int | Sequence[DeviceLike] | None = None,
    *,
    training: bool = True,
    optimizer: OptimizerLike = "adam",
    granularity: Granularity = "auto",
    progress: Shown = True,
    repeats: int = 10,
    memory_bytes: MemoryLimit = None,
    cache: CacheLike = True,
    batch_sizes: Sequence[int],
) -> list[schema.Profile]: ...


def profile(
    model: nn.Module,
    example_inputs: Any,
    devices: int | Sequence[DeviceLike] | None = None,
    *,
    training: bool = True,
    optimizer: OptimizerLike = "adam",
    granularity: Granularity = "auto",
    progress: Shown = True,
    repeats: int = 10,
    memory_bytes: MemoryLimit = None,
    cache: CacheLike = True,
    batch_sizes: Sequence[int] | None = None,
) -> schema.Profile | list[schema.Profile]:
    """Measure a model's layers, the values between them, the devices and the links.

    Every layer runs alone, its state copied to the device for it, so that a model larger than any device, or on
    ``meta``, profiles too. The model is left as it was: parameters, gradients, buffers and modes; so are the random
    number generators.

    Args:
        model: any module, on any device.
        example_inputs: of one micro-batch: one argument, a tuple of positional or a dict of keyword arguments.
        devices: a count, a list of devices, or None for all that are available. Each type of device is measured once.
        training: whether to measure a training step; the model is profiled in training mode, else in evaluation mode.
        optimizer: whose state counts, in training: a name from ``torch.optim``, a class, an optimizer, a function of a
            list of parameters that makes one, or None.
        granularity: how the model is cut into layers, see ``capture``.
        progress: whether to show a bar on stderr: where it is a terminal, ``"always"``, or not.
        repeats: how often each pass is timed at most; medians are kept.
        memory_bytes: what a placement may use of each device, in bytes, or by device; None for all of its memory.
        cache: whether layers and links that were measured before, under the same conditions, are taken from the cache:
            in the folder that ``PLACER_CACHE`` names or the user's own, in a given folder, or not at all. What is
            measured goes there at once, so that a run that was interrupted goes on where it was.
        batch_sizes: micro-batches of so many samples are measured instead of the example's: its inputs are repeated or
            cut along their first dimension. The layers are cut for the smallest, and are the same for all.

    Returns:
        The profile, with its cluster; for several batch sizes a list of profiles, the smallest size first.

    Raises:
        InputError: inputs, devices, optimizer, limits, granularity or batch sizes cannot be used.
        CaptureError: the model's layers could not be had.
        ProfilingError: a layer or link could not be measured.
    """
    if repeats < 1:
        raise InputError(f"repeats is {repeats}; time each layer at least once")
    args, kwargs = inputs.split(example_inputs)
    found = resolve(devices)
    limits = resolve_limits(found, memory_bytes)
    folder = open_cache(cache)
    state = OptimizerState(optimizer if training else None)
    by_type: dict[str, torch.device] = {}
    for device in found:
        by_type.setdefault(type_name(device), device)
    with unobserved(), keep_random_state(found), torch.inference_mode(False), inputs.mode(model, training):
        tensors, structure = inputs.trackable(args, kwargs)
        given = [tensors] if batch_sizes is None else inputs.resized(tensors, batch_sizes)
        known = {kind: _remembered(folder, device, training, optimizer, repeats) for kind, device in by_type.items()}
        calls = [structure.unflatten(batch) for batch in given]
        graphs = _graphs(model, calls, granularity, folder, list(known.values()))
        layers = [layer for graph in graphs for layer in graph.layers]
        missing = sum(len(of_kind.missing(layers)) for of_kind in known.values())
        with progress_bar(progress, missing + links_to_measure(found, folder)) as step:
            measured = [
                {
                    kind: measure_layers(graph, batch, device, training, repeats, step, state, known[kind])
                    for kind, device in by_type.items()
                }
                for graph, batch in zip(graphs, given, strict=True)
            ]
            cluster = measure(found, limits, step, folder)
    counts = [sum(getattr(of_kind, name) for of_kind in known.values()) for name in ("measured", "reused")]
    _log.info("%d layers were measured, %d taken from the cache", *counts)
    profiles = [write(graph, rows, training, state, cluster) for graph, rows in zip(graphs, measured, strict=True)]
    return profiles[0] if batch_sizes is None else profiles


def _graphs(
    model: nn.Module, calls: Sequence[Any], granularity: Granularity, folder: Cache | None, known: Sequence[Remembered]
) -> list[LayerGraph]:
    """The graph of each call, captured unless an earlier run has captured it and measured all of its layers."""
    earlier = KnownGraphs(folder, model, calls, granularity)
    found = earlier.read()
    if found is not None and not any(of_kind.missing(graph.layers) for of_kind in known for graph in found):
        return found
    graphs = capture_each(model, calls, granularity)
    earlier.keep(graphs)
    return graphs


def capture_each(model: nn.Module, calls: Sequence[Any], granularity: Granularity) -> list[LayerGraph]:
    """The graph of each call, given as positional and keyword arguments; all have the layers of the first."""
    graphs: list[LayerGraph] = []
    for args, kwargs in calls:
        cut = tuple(layer.name for layer in graphs[0].layers) if graphs else granularity
        graphs.append(capture(model, args, kwargs, granularity=cut))
        graphs[-1].granularity = graphs[0].granularity
        if not graphs[0].layers:
            raise ProfilingError(f"{type(model).__name__} has no operations, so there is nothing to place")
        if [layer.name for layer in graphs[-1].layers] != [layer.name for layer in graphs[0].layers]:
            sizes = f"{graphs[0].batch_size} and {graphs[-1].batch_size}"
            raise ProfilingError(
                f"{type(model).__name__} has other layers at batch sizes of {sizes}; profile each size apart"
            )
    return graphs


def _remembered(
    folder: Cache | None, device: torch.device, training: bool, optimizer: OptimizerLike, repeats: int
) -> Remembered:
    """What is known of layers under the conditions of this device, here and now."""
    steps = optimizer_facts(optimizer if training else None)
    if folder is None or steps is None:
        return Remembered()
    return Remembered(folder, conditions(device) | {"training": training, "optimizer": steps}, repeats)


def write(
    graph: LayerGraph,
    measured: Mapping[str, Sequence[Measurement]],
    training: bool,
    optimizer: OptimizerState,
    cluster: schema.Cluster | None,
) -> schema.Profile:
    """Write down what was measured.

    Args:
        graph: the layers.
        measured: by device type, one measurement for each layer.
        training: whether backward passes were measured.
        optimizer: whose state counts.
        cluster: the devices and links.
    """
    kept = {
        layer.name: _kept(layer, [rows[index] for rows in measured.values()])
        for index, layer in enumerate(graph.layers)
    }
    sizes = _sizes(graph, measured)
    edges = _edges(graph, kept, sizes, training)
    held = _state_bytes(graph, training, optimizer)
    owned = _owned(graph)
    unsent = _unsent(graph, kept, sizes, {edge.name for edge in edges})
    layers = []
    for index, layer in enumerate(graph.layers):
        rows = {kind: found[index] for kind, found in measured.items()}
        memories = [row.memory for row in rows.values()]
        layers.append(
            schema.Layer(
                name=layer.name,
                module=layer.module_type,
                forward_ms={kind: significant(row.time.forward_ms) for kind, row in rows.items()},
                backward_ms={kind: significant(row.time.backward_ms) for kind, row in rows.items()} if training else {},
                weights_ms=_weights(rows, held[layer.name]["grad_bytes"]),
                optimizer_ms=_beyond(
                    0.0,
                    {kind: significant((row.optimizer_ms or 0.0) * owned[layer.name]) for kind, row in rows.items()},
                ),
                spread=_beyond(0.01, {kind: significant(row.time.spread, 2) for kind, row in rows.items()}),
                host_ms={kind: significant(row.time.host_ms) for kind, row in rows.items()},
                saved_bytes=max(memory.saved_bytes for memory in memories) + unsent[layer.name],
                forward_workspace_bytes=max(memory.forward_workspace_bytes for memory in memories),
                backward_workspace_bytes=max(memory.backward_workspace_bytes for memory in memories),
                **held[layer.name],
            )
        )
    return schema.Profile(
        model=graph.model,
        graph_hash=graph.hash,
        training=training,
        optimizer=optimizer.name if training else None,
        batch_size=graph.batch_size,
        granularity=graph.granularity,
        captured=graph.captured,
        not_captured_because=graph.not_captured_because[:4096],
        layers=tuple(layers),
        edges=tuple(edge.edge for edge in edges),
        colocated=graph.colocated,
        cluster=cluster,
        versions=_versions(),
    )


def _beyond(least: float, values: Mapping[str, float]) -> dict[str, float]:
    """Without those that say nothing, which keeps profiles small."""
    return {kind: value for kind, value in values.items() if value > least}


def _weights(rows: Mapping[str, Measurement], grad_bytes: int) -> dict[str, float]:
    """The weight halves; left out where there are no gradients of parameters, as that says it all."""
    halves = {kind: significant(row.time.weights_ms) for kind, row in rows.items()}
    return halves if grad_bytes else _beyond(0.0, halves)


@dataclass(frozen=True)
class _Sent:
    """A value that crosses layers."""

    name: str
    edge: schema.Edge


def _kept(layer: Layer, rows: Sequence[Measurement]) -> set[str]:
    """The values that a layer keeps for its backward pass, on any type of device."""
    kept: set[str] = set()
    for row in rows:
        kept.update(layer.reads[index] for index in row.memory.saved_reads)
        kept.update(layer.writes[index] for index in row.memory.saved_writes)
    return kept


def _sizes(graph: LayerGraph, measured: Mapping[str, Sequence[Measurement]]) -> dict[str, int]:
    """The bytes of every value, as it was on the type of device where it was largest."""
    sizes = {name: value.bytes for name, value in graph.values.items()}
    for index, layer in enumerate(graph.layers):
        rows = [found[index].write_bytes for found in measured.values() if found[index].write_bytes]
        if rows:
            sizes.update(zip(layer.writes, map(max, zip(*rows, strict=True)), strict=True))
    return sizes


def _edges(graph: LayerGraph, kept: Mapping[str, set[str]], sizes: Mapping[str, int], training: bool) -> list[_Sent]:
    edges = []
    for name, readers in graph.readers().items():
        value = graph.values[name]
        targets = tuple(reader for reader in readers if reader != value.source)
        if value.source is None or value.dtype is None or not targets:  # a number stays with the host
            continue
        edge = schema.Edge(
            source=value.source,
            targets=targets,
            bytes=sizes[name],
            gradient_bytes=sizes[name] if training and value.requires_grad else 0,
            saved_by=tuple(layer for layer in (value.source, *targets) if name in kept[layer]),
        )
        edges.append(_Sent(name, edge))
    return edges


def _unsent(
    graph: LayerGraph, kept: Mapping[str, set[str]], sizes: Mapping[str, int], sent: set[str]
) -> dict[str, int]:
    """The bytes of kept values that no edge carries, inputs and outputs of the model, counted where first kept."""
    counted: set[str] = set()
    unsent = {}
    for layer in graph.layers:
        here = kept[layer.name] - sent - counted
        counted |= here
        unsent[layer.name] = sum(sizes[name] for name in here)
    return unsent


def _state_bytes(graph: LayerGraph, training: bool, optimizer: OptimizerState) -> dict[str, dict[str, int]]:
    """The bytes of each layer's state by kind; what several layers share counts in the first of them."""
    counted: set[int] = set()
    held = {}
    for layer in graph.layers:
        own = [graph.state[name] for name in layer.state if id(graph.state[name]) not in counted]
        counted.update(id(tensor) for tensor in own)
        parameters = [tensor for tensor in own if isinstance(tensor, nn.Parameter)]
        trained = [tensor for tensor in parameters if training and tensor.requires_grad]
        held[layer.name] = {
            "param_bytes": _total(parameters),
            "grad_bytes": _total(trained),
            "optimizer_bytes": sum(optimizer.bytes(tensor) for tensor in trained),
            "buffer_bytes": _total([tensor for tensor in own if not isinstance(tensor, nn.Parameter)]),
        }
    return held


def _owned(graph: LayerGraph) -> dict[str, float]:
    """The share of each layer's trained parameters, in bytes, that no layer before it has: the optimizer steps once."""
    counted: set[int] = set()
    shares = {}
    for layer in graph.layers:
        trained = [graph.state[name] for name in layer.state if graph.state[name].requires_grad]
        own = [tensor for tensor in trained if id(tensor) not in counted]
        counted.update(id(tensor) for tensor in own)
        shares[layer.name] = _total(own) / max(1, _total(trained))
    return shares


def _total(tensors: Sequence[Tensor]) -> int:
    return sum(tensor_bytes(tensor) for tensor in tensors)


def _placer_version() -> str:
    try:
        return version("torch-placer")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "placer": _placer_version()}
    return versions | ({"cuda": str(torch.version.cuda)} if torch.version.cuda else {})
