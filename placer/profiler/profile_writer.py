"""Conversion of measurements to a profile, including the values between layers.

A device also holds tensors that only the caller sees. Inputs stay until their last reader has run.
Results stay from the layer that makes them: in training until their gradients have come back, in
inference for good.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from placer import schema
from placer.capture.layers import Layer, LayerGraph
from placer.optimizers import OptimizerState
from placer.profiler.backward_split.deferred_slices import Rest, kept_by_slices
from placer.profiler.layer_state import owned_shares, state_bytes, ties
from placer.profiler.measurement import Measurement
from placer.profiler.memory import LayerMemory
from placer.profiler.timing import significant

__all__ = ["fragmented_bytes", "write"]


def write(
    graph: LayerGraph,
    measured: Mapping[str, Sequence[Measurement]],
    training: bool,
    optimizer: OptimizerState,
    cluster: schema.Cluster | None,
    places: Mapping[str, torch.device] | None = None,
) -> schema.Profile:
    """Return the profile of a measured graph.

    Args:
        graph: the layers.
        measured: by device type, one measurement for each layer.
        training: whether backward passes were measured.
        optimizer: the optimizer whose state counts.
        cluster: the devices and links.
        places: by device type, a device on which the optimizer's step may run; the host by default.
    """
    saved = {
        layer.name: _saved(layer, [rows[index] for rows in measured.values()])
        for index, layer in enumerate(graph.layers)
    }
    # order matters below: results count as kept, so they leave the workspace
    kept = _with_results(graph, saved) if training else saved
    sizes = _sizes(graph, measured)
    extra = _again(graph, saved, kept, sizes) if training else _outside(graph, sizes)
    around, rests = kept_by_slices(graph, measured, sizes)
    edges = _edges(graph, kept, sizes, training, rests, _deferred(graph, measured))
    pieces = _pieces_bytes(measured) if training else 0
    held = state_bytes(graph, training, optimizer)
    owned = owned_shares(graph)
    # a kept value without an edge counts once, in the first layer that keeps it
    first_kept = _first_kept(graph, kept)
    sent = {edge.name for edge in edges}
    layers = []
    for index, layer in enumerate(graph.layers):
        rows = {kind: found[index] for kind, found in measured.items()}
        unsent_bytes = sum(sizes[name] for name in first_kept[layer.name] - sent)
        own = _workspaces([*rows.values()], pieces, extra[index], around[index])
        own |= _times(rows, training, held[layer.name]["grad_bytes"], owned[layer.name])
        own["saved_bytes"] = unsent_bytes + max(row.memory.saved_bytes for row in rows.values())
        own |= held[layer.name]
        layers.append(schema.Layer(name=layer.name, module=layer.module_type, **own))
    return schema.Profile(
        model=graph.model,
        graph_hash=graph.hash,
        training=training,
        optimizer=optimizer.name if training else None,
        optimizer_workspace_ratio=_step_share(graph, optimizer, measured, places or {})
        if training
        else 0.0,
        batch_size=graph.batch_size,
        granularity=graph.granularity,
        captured=graph.captured,
        not_captured_because=graph.not_captured_because[:4096],
        layers=tuple(layers),
        edges=tuple(edge.edge for edge in edges),
        colocated=graph.colocated,
        tied=tuple(ties(graph, training)),
        cluster=cluster,
        versions=_versions(),
    )


def _times(
    rows: Mapping[str, Measurement], training: bool, grad_bytes: int, owned: float
) -> dict[str, Any]:
    """Return a layer's times by device type, as fields of ``schema.Layer``.

    Args:
        rows: the layer's measurements, by device type.
        training: whether backward passes were measured.
        grad_bytes: the bytes of its parameters' gradients.
        owned: the share of its parameters that no earlier layer uses.
    """
    backward_ms = {kind: significant(row.time.backward_ms) for kind, row in rows.items()}
    optimizer_ms = {
        kind: significant((row.optimizer_ms or 0.0) * owned) for kind, row in rows.items()
    }
    spread = {kind: significant(row.time.spread, 2) for kind, row in rows.items()}
    return {
        "forward_ms": {kind: significant(row.time.forward_ms) for kind, row in rows.items()},
        "backward_ms": backward_ms if training else {},
        "weight_grad_ms": _weights(rows, grad_bytes),
        "optimizer_ms": _beyond(0.0, optimizer_ms),
        "spread": _beyond(0.01, spread),
        "host_ms": {kind: significant(row.time.host_ms) for kind, row in rows.items()},
    }


def _workspaces(
    rows: Sequence[Measurement], pieces: int, extra: int, around: int
) -> dict[str, Any]:
    """Return a layer's workspaces, as fields of ``schema.Layer``; the largest device type counts.

    Args:
        rows: the layer's measurements, one for each device type.
        pieces: the bytes of the allocator's pieces, which every pass needs.
        extra: the bytes to add to the forward pass; negative to subtract.
        around: the bytes present during the backward pass.
    """
    memories = [row.memory for row in rows]
    forward = max(memory.forward_workspace_bytes for memory in memories)
    backward = max(memory.backward_workspace_bytes for memory in memories)
    recorded = _told_apart((memory.recorded_workspace_bytes for memory in memories), memories)
    of_input = _told_apart((memory.input_grad_workspace_bytes for memory in memories), memories)
    of_weights = _material(max(memory.weight_grad_workspace_bytes for memory in memories))
    return {
        "forward_workspace_bytes": pieces + max(0, extra + forward),
        "backward_workspace_bytes": pieces + around + backward,
        "recorded_workspace_bytes": _with_workspace(recorded, pieces + around),
        "deferred_bytes": max(memory.deferred_bytes for memory in memories),
        "input_grad_workspace_bytes": _with_workspace(of_input, pieces + around),
        "weight_grad_workspace_bytes": _with_workspace(of_weights, pieces),
    }


def _pieces_bytes(measured: Mapping[str, Sequence[Measurement]]) -> int:
    """Return the largest pieces of any layer and device type."""
    return max(row.memory.pieces_bytes for rows in measured.values() for row in rows)


def fragmented_bytes(measured: Sequence[Mapping[str, Sequence[Measurement]]]) -> dict[str, int]:
    """Return for each device type the largest fragmentation of any layer and batch size."""
    most: dict[str, int] = {}
    for of_size in measured:
        for kind, rows in of_size.items():
            most[kind] = max([most.get(kind, 0), *(row.memory.fragmented_bytes for row in rows)])
    return most


def _beyond(least: float, values: Mapping[str, float]) -> dict[str, float]:
    """Return the values above ``least``; omitting the others keeps profiles small."""
    return {kind: value for kind, value in values.items() if value > least}


def _weights(rows: Mapping[str, Measurement], grad_bytes: int) -> dict[str, float]:
    """Return the weight-gradient times.

    Zeros are omitted for layers without gradients of parameters.
    """
    halves = {kind: significant(row.time.weight_grad_ms) for kind, row in rows.items()}
    return halves if grad_bytes else _beyond(0.0, halves)


@dataclass(frozen=True)
class _Sent:
    """A value that crosses layers."""

    name: str
    edge: schema.Edge


def _saved(layer: Layer, rows: Sequence[Measurement]) -> set[str]:
    """Return the values that a layer saves for its backward pass, on any device type."""
    saved: set[str] = set()
    for row in rows:
        saved.update(layer.reads[index] for index in row.memory.saved_reads)
        saved.update(layer.writes[index] for index in row.memory.saved_writes)
    return saved


def _with_results(graph: LayerGraph, saved: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the values kept in training, with the model's results, which the loss reads."""
    return {
        layer.name: saved[layer.name] | set(graph.outputs).intersection(layer.writes)
        for layer in graph.layers
    }


def _again(
    graph: LayerGraph,
    saved: Mapping[str, set[str]],
    kept: Mapping[str, set[str]],
    sizes: Mapping[str, int],
) -> list[int]:
    """Return for each layer the (negative) bytes of results counted twice.

    They are part of the measured workspace, but count as kept.
    """
    return [
        -sum(sizes[name] for name in kept[layer.name] - saved[layer.name]) for layer in graph.layers
    ]


def _outside(graph: LayerGraph, sizes: Mapping[str, int]) -> list[int]:
    """Return for each layer the bytes of live inputs and results that no edge covers.

    This applies to inference.
    """
    place = {layer.name: index for index, layer in enumerate(graph.layers)}
    readers = {name: [place[reader] for reader in found] for name, found in graph.readers().items()}
    extra = [0] * len(graph.layers)
    for name in dict.fromkeys((*graph.inputs, *graph.outputs)):
        if name not in graph.values or graph.values[name].dtype is None:
            continue
        source, read = graph.values[name].source, readers.get(name, [])
        if source is None:
            there = range(min(read), max(read) + 1) if read else range(0)
        else:
            there = range(max([place[source] - 1, *read]) + 1, len(graph.layers))
        for index in there:
            extra[index] += sizes[name]
    return extra


def _with_workspace(workspace: int, around: int) -> int:
    """Add ``around`` to a workspace; 0 stays 0, because it stands for another workspace."""
    return workspace + around if workspace else 0


def _sizes(graph: LayerGraph, measured: Mapping[str, Sequence[Measurement]]) -> dict[str, int]:
    """Return the bytes of every value, on the device type where it is largest."""
    sizes = {name: value.bytes for name, value in graph.values.items()}
    for index, layer in enumerate(graph.layers):
        rows = [found[index].write_bytes for found in measured.values() if found[index].write_bytes]
        if rows:
            sizes.update(zip(layer.writes, map(max, zip(*rows, strict=True)), strict=True))
    return sizes


def _edges(
    graph: LayerGraph,
    kept: Mapping[str, set[str]],
    sizes: Mapping[str, int],
    training: bool,
    rests: Mapping[str, Rest],
    deferred: Collection[str],
) -> list[_Sent]:
    edges = []
    for name, readers in graph.readers().items():
        value = graph.values[name]
        targets = tuple(reader for reader in readers if reader != value.source)
        # numbers stay on the host
        if value.source is None or value.dtype is None or not targets:
            continue
        rest = rests.get(name, Rest())
        edge = schema.Edge(
            source=value.source,
            targets=targets,
            bytes=sizes[name],
            gradient_bytes=sizes[name] if training and value.requires_grad else 0,
            saved_by=tuple(layer for layer in (value.source, *targets) if name in kept[layer]),
            retained_bytes=rest.bytes,
            retained_until=rest.until,
            deferred=name in deferred and len(targets) == 1 and _material(sizes[name]) > 0,
        )
        edges.append(_Sent(name, edge))
    return edges


def _deferred(graph: LayerGraph, measured: Mapping[str, Sequence[Measurement]]) -> set[str]:
    """Return the values whose gradients are deferred to weight-gradient passes on all types."""
    found: set[str] = set()
    for index, layer in enumerate(graph.layers):
        of_each = [rows[index].memory.deferred_writes for rows in measured.values()]
        found.update(layer.writes[place] for place in frozenset.intersection(*of_each))
    return found


def _first_kept(graph: LayerGraph, kept: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return for each layer the values that it keeps and no earlier layer does."""
    counted: set[str] = set()
    first = {}
    for layer in graph.layers:
        first[layer.name] = kept[layer.name] - counted
        counted |= kept[layer.name]
    return first


def _step_share(
    graph: LayerGraph,
    optimizer: OptimizerState,
    measured: Mapping[str, Sequence[Measurement]],
    places: Mapping[str, torch.device],
) -> float:
    """Return the largest share of optimizer temporaries over the GPU types.

    0 on CPUs, which step parameters one by one.
    """
    gpus = [kind for kind, rows in measured.items() if any(row.memory.in_segments for row in rows)]
    trained = [tensor for tensor in graph.state.values() if tensor.requires_grad]
    return significant(
        max((optimizer.step_share(trained, places.get(kind)) for kind in gpus), default=0.0)
    )


def _material(size_bytes: int) -> int:
    """Return the size, or 0 if it is below 1 MiB, which keeps profiles small."""
    return size_bytes if size_bytes >= 2**20 else 0


def _told_apart(sizes: Iterable[int], memories: Sequence[LayerMemory]) -> int:
    """Return the workspace of a recorded or input-gradient pass.

    0 stands for the eager backward workspace, and is returned if the difference is below 1 MiB.
    """
    eager = [memory.backward_workspace_bytes for memory in memories]
    own = max(size or other for size, other in zip(sizes, eager, strict=True))
    return own if _material(abs(own - max(eager))) else 0


def _placer_version() -> str:
    try:
        return version("torch-placer")
    except PackageNotFoundError:  # a source tree that is not installed
        return "unknown"


def _versions() -> dict[str, str]:
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "placer": _placer_version(),
    }
    return versions | ({"cuda": str(torch.version.cuda)} if torch.version.cuda else {})
