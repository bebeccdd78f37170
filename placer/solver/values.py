"""Values between layers and shared parameters of a request, by the layers' numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from placer.schema import Edge, PlacementRequest


@dataclass(frozen=True)
class Value:
    """One edge of the profile, by index; or the gradients of tied parameters, first to last layer.

    Attributes:
        source: the layer that makes it.
        readers: the layers that read it, ascending, each once.
        bytes: its size for one micro-batch.
        gradient_bytes: the size of its gradient; 0 in inference.
        keepers: the layers that keep it for their backward pass; none in inference.
        retained_bytes: memory in addition to the last reader's gradient, held until the reader
            before it has run; for tied parameters, their gradient.
        retained_from: the layer until which, backwards, the rest waits.
        retained_until: the layer from which on, backwards, the rest waits.
        arriving_bytes: the part of its gradient that is stored outside passes where it comes from
            another device: none where its source's weight-gradient pass keeps it anyway.
        ordered: whether its source must be at its readers' stage or before, if contiguous.
        unbound: readers to which this does not apply.
        weightless: whether it takes no memory, as in published inputs that count state alone.
        repeats: how often it is sent; 0 if its readers only wait for its source.
    """

    source: int
    readers: tuple[int, ...]
    bytes: int
    gradient_bytes: int
    keepers: tuple[int, ...]
    retained_bytes: int = 0
    retained_from: int = 0
    retained_until: int = 0
    arriving_bytes: int = 0
    ordered: bool = True
    unbound: frozenset[int] = frozenset()
    weightless: bool = False
    repeats: int = 1

    @cached_property
    def reader_set(self) -> frozenset[int]:
        """The layers that read it."""
        return frozenset(self.readers)

    @property
    def bound_readers(self) -> tuple[int, ...]:
        """The readers that contiguity puts at their source's stage or behind it."""
        return (
            tuple(reader for reader in self.readers if reader not in self.unbound)
            if self.ordered
            else ()
        )

    @property
    def held_bytes(self) -> int:
        """The bytes that the value takes of a device's memory."""
        return 0 if self.weightless else self.bytes

    @property
    def waiting_bytes(self) -> int:
        """The most bytes of its gradient that wait, with what waits in addition."""
        return self.gradient_bytes + self.retained_bytes


@dataclass(frozen=True)
class SharedState:
    """Parameters that several layers share and that may be on several devices.

    They count in the state of the layer that runs first. A device that holds others and not the
    first holds a copy.

    Attributes:
        first: the layer that runs first.
        others: the other layers.
        param_bytes: of a copy.
        grad_bytes: of its gradients; 0 in inference.
    """

    first: int
    others: frozenset[int]
    param_bytes: int
    grad_bytes: int

    @property
    def total_bytes(self) -> int:
        """The bytes of a copy."""
        return self.param_bytes + self.grad_bytes


def _value(request: PlacementRequest, edge: Edge, place: dict[str, int]) -> Value:
    ends = place[edge.source], *sorted({place[target] for target in edge.targets})
    retained_until = place[edge.retained_until] if edge.retained_until else ends[-1]
    if not request.is_training:
        return Value(
            source=ends[0],
            readers=ends[1:],
            bytes=edge.bytes,
            gradient_bytes=0,
            keepers=(),
            retained_from=ends[-2],
            retained_until=retained_until,
            repeats=edge.repeats,
        )
    apart = request.schedule == "zero-bubble"
    kept_anyhow = apart and edge.deferred and len(ends) == 2
    return Value(
        source=ends[0],
        readers=ends[1:],
        bytes=edge.bytes,
        gradient_bytes=edge.gradient_bytes,
        keepers=tuple(sorted({place[keeper] for keeper in edge.saved_by})),
        retained_bytes=edge.retained_bytes,
        retained_from=ends[-2],
        retained_until=retained_until,
        arriving_bytes=0 if kept_anyhow else edge.gradient_bytes,
    )


def values_of(request: PlacementRequest, place: dict[str, int]) -> tuple[Value, ...]:
    """Return the values of a request: one per edge and, in training, one per tie.

    Args:
        request: the placement request.
        place: by name of a layer, its number.
    """
    values = [_value(request, edge, place) for edge in request.profile.edges]
    for tie in request.profile.tied if request.is_training else ():
        if tie.split or not tie.gradient_bytes:
            continue
        sharing = sorted(place[layer] for layer in tie.layers)
        first, last = sharing[0], sharing[-1]
        values.append(
            Value(first, (last,), 0, 0, (), tie.gradient_bytes, first, last, ordered=False)
        )
    return tuple(values)


def shared_state_of(request: PlacementRequest, place: dict[str, int]) -> tuple[SharedState, ...]:
    """Return the parameters that several layers share and may have copies of.

    Args:
        request: the placement request.
        place: by name of a layer, its number.
    """
    found = []
    for tie in request.profile.tied:
        if tie.split:
            first, *others = sorted({place[layer] for layer in tie.layers})
            gradients = tie.gradient_bytes if request.is_training else 0
            found.append(SharedState(first, frozenset(others), tie.copy_bytes, gradients))
    return tuple(found)


def arcs_of(values: Iterable[Value]) -> list[tuple[int, int]]:
    """Return all pairs of a layer that makes a value and a reader that contiguity orders."""
    return [(value.source, reader) for value in values for reader in value.bound_readers]


def gradient_arcs(values: Iterable[Value]) -> list[tuple[int, int]]:
    """Return all pairs of a layer that makes a value with a gradient and a reader of it."""
    return [
        (value.source, reader)
        for value in values
        if value.gradient_bytes
        for reader in value.readers
    ]
