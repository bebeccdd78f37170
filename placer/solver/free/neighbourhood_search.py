"""Large neighbourhood search for free placements: what two or three devices hold is divided anew,
exactly.

Of an assignment the nodes on a few devices, the busiest among them, may move among these; all
others stay. The integer program makes the busiest of the few less busy, and keeps the others within
the bottleneck that is known. An assignment is taken if its loads, the largest first, are smaller
than before: so one that only frees a device that is nearly as busy as another is a step too.

Source: Shaw, "Using constraint programming and local search methods to solve vehicle routing
problems", 1998.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import TYPE_CHECKING

from placer.solver import costs
from placer.solver.cpsat.model import PlacementModel, worth_building
from placer.solver.cpsat.runner import Limits
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction, reduced

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

SIZES = (2, 3)
"""How many devices divide their nodes anew."""

WORK = 0.3
"""Of one program, in the measure of ``cpsat.Meter``."""

MANY = 500
"""So many pairs of a node and a device are many."""

BETTER = 1e-6
"""By which share the busiest of the devices must become less busy."""


def applies(problem: Problem) -> bool:
    """Whether it looks for such placements: free, and with a small bottleneck."""
    return not problem.contiguous and problem.request.objective == "throughput"


def many(problem: Problem, nodes: Reduction) -> bool:
    """Whether it comes before the integer program of all devices, which takes long for so many
    nodes.
    """
    return len(nodes.nodes) * len(problem.devices) >= MANY


def improved(
    problem: Problem,
    start: Sequence[int],
    limits: Callable[[float], Limits],
    over: Callable[[], bool],
) -> list[int]:
    """The best assignment met on the way from one.

    Args:
        problem: what is asked, by objective ``throughput``, placements free.
        start: by layer, its device; it meets all requirements.
        limits: for a search of so much work.
        over: ends the search.

    Returns:
        By layer, its device.
    """
    random = Random(problem.request.seed)
    best, loads = list(start), _loads(problem, start)
    untried = _choices(loads, random)
    while not over():
        few = next(untried, None)
        if few is None:
            break
        found = _divided_anew(problem, best, few, loads, limits(WORK))
        if found is not None and sorted(_loads(problem, found), reverse=True) < sorted(
            loads, reverse=True
        ):
            best, loads = found, _loads(problem, found)
            untried = _choices(loads, random)
    return best


def _choices(loads: Sequence[float], random: Random) -> Iterator[frozenset[int]]:
    """The devices to look at together: the busiest with one other, then with two, in random order."""
    busiest = max(range(len(loads)), key=lambda device: loads[device])
    others = [device for device in range(len(loads)) if device != busiest]
    for size in SIZES:
        every = list(combinations(others, size - 1))
        random.shuffle(every)
        for few in every:
            yield frozenset({busiest, *few})


def _divided_anew(
    problem: Problem,
    best: Sequence[int],
    few: frozenset[int],
    loads: Sequence[float],
    limits: Limits,
) -> list[int] | None:
    """An assignment in which the busiest of a few devices is less busy, as nodes move among them;
    None if none.
    """
    allowed = tuple(
        devices & few if here in few else frozenset({here})
        for here, devices in zip(best, problem.allowed, strict=True)
    )
    part = replace(problem, allowed=allowed)
    nodes = reduced(part, max(loads))
    if not worth_building(part, nodes):
        return None
    model = _PartModel(
        part, nodes, max(loads), few, max(loads[device] for device in few) * (1 - BETTER)
    )
    return model.solve(limits).devices


class _PartModel(PlacementModel):
    """Placements in which some devices are less busy than so long, and the others than what is
    known.

    Args:
        problem: what is asked, with most nodes where they are.
        nodes: its layers, joined where they must be together.
        upper: the bottleneck that is known.
        few: the devices that are to be less busy.
        most_ms: no more than this.
    """

    def __init__(
        self, problem: Problem, nodes: Reduction, upper: float, few: frozenset[int], most_ms: float
    ) -> None:
        self._few, self._most_ms = few, most_ms
        super().__init__(problem, nodes, upper=upper)

    def most_busy(self, device: int) -> cp_model.IntVar | int:
        """What a device's load may be: the goal for the few, else what is known."""
        return self.makespan if device in self._few else self.upper

    def _set_goal(self) -> None:
        self.cp.add(self.makespan <= self.steps(self._most_ms))
        super()._set_goal()


def _loads(problem: Problem, devices: Sequence[int]) -> tuple[float, ...]:
    result = costs.evaluate(problem, devices)
    assert result is not None  # it has no other links than the one before
    return result.load_ms
