"""What devices hold where each of their segments has as many micro-batches in flight as its order
of passes has.

Segments run as they are, layer by layer, or as recorded passes; a device is reckoned with what is
more (see ``memory.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from placer.schema import MemoryUse
from placer.solver import memory, pipelines
from placer.solver.memory import Footprint, Recorded
from placer.solver.problem import Problem


class SegmentMemory:
    """Tells it for one assignment, whatever is in flight.

    Args:
        problem: what is asked.
        assignment: by layer, the index of its device.
        footprints: by device, what its layers hold, whatever their segments.
    """

    def __init__(
        self, problem: Problem, assignment: Sequence[int], footprints: Callable[[int], Footprint]
    ) -> None:
        self._problem, self._footprints = problem, footprints
        self._segment_of, self._places = pipelines.staged(problem, assignment, ())

    def use(self, flight: Sequence[int]) -> tuple[MemoryUse, ...]:
        """By device, what it holds at its worst moment, with so many micro-batches in flight in
        each segment.
        """
        further = self._further_bytes(flight)
        return tuple(
            self._of(device, further[device], flight)
            for device in range(len(self._problem.devices))
        )

    def _of(self, device: int, further: int, flight: Sequence[int]) -> MemoryUse:
        one = self._footprints(device).one
        eager = one.model_copy(update={"activation_bytes": one.activation_bytes + further})
        passing = shared = 0
        for place, segment, held in zip(self._places, self._recorded, flight, strict=True):
            if place == device:
                passing += segment.passing_bytes(held)
                shared += segment.shared_bytes
        if passing + shared <= eager.activation_bytes + eager.workspace_bytes:
            return eager
        return one.model_copy(update={"activation_bytes": passing, "workspace_bytes": shared})

    @cached_property
    def _recorded(self) -> list[Recorded]:
        """By segment, what it holds of recorded passes, and of the optimizer's step."""
        layers: list[list[int]] = [[] for _ in self._places]
        for layer, segment in enumerate(self._segment_of):
            layers[segment].append(layer)
        return [
            memory.recorded(self._problem, memory.held_with(self._problem, own)) for own in layers
        ]

    def _further_bytes(self, flight: Sequence[int]) -> list[int]:
        """By device, what micro-batches beside the first keep, layer by layer.

        A layer keeps what it saves for as many as its segment has in flight, a value that several
        segments of a device keep is there for as many as the largest of those numbers.
        """
        further = [0] * len(self._problem.devices)
        for layer, segment in enumerate(self._segment_of):
            further[self._places[segment]] += (flight[segment] - 1) * self._problem.layers[
                layer
            ].saved_bytes
        for value in self._problem.values:
            most: dict[int, int] = {}
            for segment in map(self._segment_of.__getitem__, value.keepers):
                device = self._places[segment]
                most[device] = max(most.get(device, 0), flight[segment])
            for device, count in most.items():
                further[device] += (count - 1) * value.held_bytes
        return further
