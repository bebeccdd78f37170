"""Segments: the layers of a graph grouped by device, with their reads and releases."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from placer import devices
from placer.capture.batch_counters import added_together, batch_counters
from placer.capture.layers import Layer, LayerGraph
from placer.capture.weight_grads.deferred import DeferWeightGradients, GradientQueue
from placer.executor.stage_errors import Trail

StateLookup = Callable[[str, torch.device], Tensor]
"""A function from a name and a device to the parameter, buffer or constant that a layer there uses.
"""


class StateCopy(Protocol):
    """A copy of a tensor on another device; ``state_copies`` creates them."""

    tensor: Tensor

    def refresh(self) -> None:
        """Copy the original again if it was written to."""


class RestingState(Protocol):
    """Parameters of a layer that rest on the host; ``resting_weights`` creates them."""

    def enter(self) -> None:
        """Let later work on the layer's device read their copies."""

    def leave(self) -> None:
        """Note that the layer has run."""


MakeCopy = Callable[[Tensor, torch.device], StateCopy]
"""A function that returns the current copy of a tensor on a device."""


@dataclass
class Step:
    """One layer on its device.

    Attributes:
        layer: the layer.
        device: where it runs.
        state: its parameters, buffers and constants; foreign ones are moved for every micro-batch.
        foreign: positions in ``state`` of tensors on other devices.
        make_copy: copies foreign state to the device, once; None to move it for every micro-batch.
        private: positions of buffers that the layer changes and may read again in its backward
            pass, after later micro-batches have changed them. Each micro-batch gets a copy.
        forget: values without a reader after this step.
        resting: the parameters that rest on the host, and by position in ``state`` their copies on
            this device; None without any.
    """

    layer: Layer
    device: torch.device
    state: list[Tensor]
    foreign: tuple[int, ...]
    private: tuple[int, ...]
    forget: tuple[str, ...]
    make_copy: MakeCopy | None = None
    resting: tuple[RestingState, Mapping[int, Tensor]] | None = None
    _copied: dict[int, StateCopy] = field(default_factory=dict)

    def run(self, values: MicroBatch) -> None:
        """Compute the layer for one micro-batch."""
        layer, device = self.layer, self.device
        values.trail.enter(layer.name)
        state = self.state
        if self.resting is not None:
            unit, views = self.resting
            unit.enter()
            state = [views.get(index, tensor) for index, tensor in enumerate(state)]
        if self.foreign:
            state = list(state)
            for index in self.foreign:
                state[index] = self._brought(index, values)
        if self.private:
            state = [
                tensor.clone() if index in self.private else tensor
                for index, tensor in enumerate(state)
            ]
        reads = [values.read(name, device) for name in layer.reads]
        with devices.current(device):
            writes = layer.function(device, state, reads)
        if self.resting is not None:
            self.resting[0].leave()
        values.write(layer.writes, writes)
        values.trail.leave(layer.name, writes)
        for index in (*self.foreign, *self.private):
            if layer.state[index] in layer.mutated:
                self._bring_back(index, state[index])
        values.forget(self.forget)

    def _brought(self, index: int, values: MicroBatch) -> Tensor:
        """Return foreign state on this device."""
        tensor, name = self.state[index], self.layer.state[index]
        flows_back = (torch.is_grad_enabled() and tensor.requires_grad) or devices.is_in_transform()
        if self.make_copy is None or flows_back or name in self.layer.mutated:
            return values.state(name, tensor, self.device)
        if index not in self._copied:
            self._copied[index] = self.make_copy(tensor, self.device)
        return self._copied[index].tensor

    def refresh(self) -> None:
        """Update copies of foreign state."""
        for copy in self._copied.values():
            copy.refresh()

    def counters(self) -> list[Tensor]:
        """Return the batch counters that the layer increments in place."""
        return [] if self.foreign or self.private else batch_counters(self.layer, self.state)

    def reads_state(self) -> list[Tensor]:
        """Return its state beyond running statistics that it only updates."""
        named = zip(self.layer.state, self.state, strict=True)
        return [tensor for name, tensor in named if name not in self.layer.statistics]

    @torch.no_grad()
    def _bring_back(self, index: int, changed: Tensor) -> None:
        self.state[index].copy_(changed)


@dataclass
class Segment:
    """A maximal run of layers on one device, in execution order.

    Attributes:
        device: where they run.
        steps: the layers.
    """

    device: torch.device
    steps: list[Step] = field(default_factory=list)

    def refresh(self) -> None:
        """Update the copies of foreign state on this device; called before every call."""
        for step in self._borrowing:
            step.refresh()

    @cached_property
    def _borrowing(self) -> list[Step]:
        return [step for step in self.steps if step.foreign]

    def deferring(self, queue: GradientQueue) -> AbstractContextManager[Any]:
        """Return a context in which the backward pass defers weight gradients to a queue."""
        return DeferWeightGradients(queue)

    def counting(self) -> AbstractContextManager[Any]:
        """Return a context in which batch counters are incremented together at the end."""
        return added_together(self._counted)

    @cached_property
    def _counted(self) -> list[Tensor]:
        read = {id(tensor) for step in self.steps for tensor in step.reads_state()}
        return [one for step in self.steps for one in step.counters() if id(one) not in read]

    def resting_apart(self) -> list[Segment]:
        """Return the segment in pieces: each layer whose parameters rest begins one."""
        pieces: list[Segment] = []
        for step in self.steps:
            if not pieces or step.resting is not None:
                pieces.append(Segment(self.device))
            pieces[-1].steps.append(step)
        return pieces

    def run(self, values: MicroBatch) -> None:
        """Compute the segment for one micro-batch."""
        for step in self.steps:
            step.run(values)


class MicroBatch:
    """The values of one micro-batch, with a copy on each device that reads them.

    Each copy is sent once.

    Args:
        names: of the given values.
        tensors: the given values.
        trail: records which layer runs.
    """

    def __init__(
        self, names: Iterable[str], tensors: Iterable[Any], trail: Trail | None = None
    ) -> None:
        self.trail = Trail() if trail is None else trail
        self._made: dict[str, Any] = dict(zip(names, tensors, strict=True))
        self._copies: dict[tuple[str, torch.device], Tensor] = {}

    def read(self, name: str, device: torch.device) -> Any:
        """Return the value on a device."""
        value = self._made[name]
        return self._on(name, value, device) if isinstance(value, Tensor) else value

    def made(self, name: str) -> Any:
        """Return the value on its own device."""
        return self._made[name]

    def state(self, name: str, tensor: Tensor, device: torch.device) -> Tensor:
        """Return foreign state on this device; gradients flow back to its own device.

        Args:
            name: of the parameter, buffer or constant.
            tensor: where it is.
            device: where it is needed.
        """
        return self._on(f"state {name}", tensor, device)

    def _on(self, name: str, tensor: Tensor, device: torch.device) -> Tensor:
        copy = self._copies.get((name, device))
        if copy is None:
            copy = devices.move(tensor, device)
            self._copies[name, device] = copy
        return copy

    def write(self, names: Sequence[str], values: Sequence[Any]) -> None:
        """Add the values of a layer."""
        self._made.update(zip(names, values, strict=True))

    def forget(self, names: Iterable[str]) -> None:
        """Release values without further readers."""
        for name in names:
            del self._made[name]
            for key in [key for key in self._copies if key[0] == name]:
                del self._copies[key]


def segments(
    graph: LayerGraph,
    places: Sequence[torch.device],
    lookup: StateLookup,
    make_copy: MakeCopy | None = None,
    starts: Collection[int] = (),
) -> list[Segment]:
    """Divide a layer graph into segments.

    Args:
        graph: the layers, in execution order.
        places: the device of each.
        lookup: returns the tensors of a layer's state.
        make_copy: copies foreign state to a device, once; None to move it for every micro-batch.
        starts: numbers of layers with which a further segment begins.
    """
    spread = set(spread_state(graph, places))
    result: list[Segment] = []
    rows = zip(graph.layers, places, _last_read_values(graph), strict=True)
    for index, (layer, device, names) in enumerate(rows):
        if not result or result[-1].device != device or index in starts:
            result.append(Segment(device))
        state = [lookup(name, device) for name in layer.state]
        foreign = tuple(
            index
            for index, tensor in enumerate(state)
            if not devices.same(devices.location(tensor), device)
        )
        private = tuple(
            index
            for index, name in enumerate(layer.state)
            if name in layer.mutated
            and index not in foreign
            and (name in spread or name not in layer.statistics)
        )
        result[-1].steps.append(
            Step(layer, device, state, foreign, private, tuple(names), make_copy)
        )
    return result


def _last_read_values(graph: LayerGraph) -> list[list[str]]:
    """Return, by layer, the values that no later layer reads and that are not outputs."""
    last_read = {
        name: index
        for index, layer in enumerate(graph.layers)
        for name in (*layer.writes, *layer.reads)
    }
    kept = set(graph.outputs)
    found: list[list[str]] = [[] for _ in graph.layers]
    for name, index in last_read.items():
        if name not in kept:
            found[index].append(name)
    return found


def spread_state(graph: LayerGraph, places: Sequence[torch.device]) -> dict[str, set[torch.device]]:
    """Return state that layers change and several devices use, with these devices.

    One of the devices owns it.

    Args:
        graph: the layers.
        places: the device of each.
    """
    changed = {name for layer in graph.layers for name in layer.mutated}
    users: dict[str, set[torch.device]] = {}
    for layer, device in zip(graph.layers, places, strict=True):
        for name in changed.intersection(layer.state):
            users.setdefault(name, set()).add(device)
    return {name: found for name, found in users.items() if len(found) > 1}


def read_back(layers: Sequence[Layer]) -> set[str]:
    """Return the names of changed state that a layer also reads, perhaps in its backward pass.

    Args:
        layers: all layers of a graph.
    """
    changed = {name for layer in layers for name in layer.mutated}
    return {
        name
        for layer in layers
        for name in changed.intersection(layer.state)
        if name not in layer.statistics
    }


def taken_in_turn(parts: Sequence[Segment], gathered: bool = False) -> str | None:
    """Return the name of state that forces micro-batches to run one after another.

    It is changed by one segment and used by another, which would otherwise see the changes of later
    micro-batches.

    Args:
        parts: the segments of a graph.
        gathered: whether running statistics are updated after the batch, from all micro-batches.

    Returns:
        The name; None without such state.
    """
    layers = [step.layer for part in parts for step in part.steps]
    changed = (
        read_back(layers) if gathered else {name for layer in layers for name in layer.mutated}
    )
    if not changed:
        return None
    users: dict[str, set[int]] = {}
    for index, part in enumerate(parts):
        for name in (name for step in part.steps for name in step.layer.state if name in changed):
            users.setdefault(name, set()).add(index)
    return next((name for name, found in users.items() if len(found) > 1), None)


def borders(
    parts: Sequence[Segment], outputs: Sequence[str]
) -> tuple[list[tuple[str, ...]], list[dict[str, list[int]]]]:
    """Return the values between segments; the last segment also receives the model's outputs.

    Args:
        parts: the segments of a graph.
        outputs: names of the model's outputs.

    Returns:
        For each segment, the names that it reads from others; and, by name that it makes, the
        segments that read it.
    """
    made_by = {
        name: index
        for index, part in enumerate(parts)
        for step in part.steps
        for name in step.layer.writes
    }
    reads: list[tuple[str, ...]] = []
    for index, part in enumerate(parts):
        names = [name for step in part.steps for name in step.layer.reads]
        names += outputs if index == len(parts) - 1 else ()
        reads.append(tuple(name for name in dict.fromkeys(names) if made_by.get(name) != index))
    writes: list[dict[str, list[int]]] = [{} for _ in parts]
    for reader, names_read in enumerate(reads):
        for name in names_read:
            # All other names are inputs of the model.
            if name in made_by:
                writes[made_by[name]].setdefault(name, []).append(reader)
    return reads, writes
