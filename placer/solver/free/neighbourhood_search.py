"""Large neighbourhood search for free placements: a few devices redivide their nodes.

The nodes on a few devices, the busiest among them, may move among these; all others stay. The
integer program makes the busiest of the few less busy, and keeps the others within the known
bottleneck. An assignment is accepted if its loads, the largest first, are smaller than before. So
freeing one of two equally busy devices is a step too. It serves problems whose loads do not add up,
as with overlapped transfers, where ``pair_search.py`` does not apply.

Source: Shaw, "Using constraint programming and local search methods to solve vehicle routing
problems", 1998.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random

from ortools.sat.python import cp_model

from placer.schema.base import PROVEN_GAP
from placer.solver import costs
from placer.solver.cpsat.model import PlacementModel, worth_building
from placer.solver.cpsat.runner import Limits
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction, reduced

SIZES = (2, 3)
"""Numbers of devices that redivide their nodes: pairs first, as their programs are small."""

WORK = 0.3
"""Work of one program, in the measure of ``cpsat.runner.Meter``: a third of a second."""


def redivided(
    problem: Problem,
    start: Sequence[int],
    limits: Callable[[float], Limits],
    over: Callable[[], bool],
) -> list[int]:
    """Return the best assignment found from a start.

    Args:
        problem: the placement problem, placements free, by objective ``throughput``.
        start: by layer, its device; it meets all requirements.
        limits: makes the limits of a search of some work.
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
        found = _redivided(problem, best, few, loads, limits(WORK))
        if found is not None and sorted(_loads(problem, found), reverse=True) < sorted(
            loads, reverse=True
        ):
            best, loads = found, _loads(problem, found)
            untried = _choices(loads, random)
    return best


def _choices(loads: Sequence[float], random: Random) -> Iterator[frozenset[int]]:
    """Yield sets of devices: the busiest with one other, then with two, in random order."""
    busiest = max(range(len(loads)), key=lambda device: loads[device])
    others = [device for device in range(len(loads)) if device != busiest]
    for size in SIZES:
        every = list(combinations(others, size - 1))
        random.shuffle(every)
        for few in every:
            yield frozenset({busiest, *few})


def _redivided(
    problem: Problem,
    best: Sequence[int],
    few: frozenset[int],
    loads: Sequence[float],
    limits: Limits,
) -> list[int] | None:
    """Return an assignment in which the busiest of a few devices is less busy, or None."""
    allowed = tuple(
        devices & few if here in few else frozenset({here})
        for here, devices in zip(best, problem.allowed, strict=True)
    )
    part = replace(problem, allowed=allowed)
    nodes = reduced(part, max(loads))
    if not worth_building(part, nodes):
        return None
    model = _PartModel(
        part, nodes, max(loads), few, max(loads[device] for device in few) * (1 - PROVEN_GAP)
    )
    return model.solve(limits).devices


class _PartModel(PlacementModel):
    """Placements in which a few devices stay within a limit, and the others within the known one.

    Args:
        problem: the placement problem, with most nodes fixed.
        nodes: its layers, joined where they must be together.
        upper: the known bottleneck.
        few: the devices that are to be less busy.
        most_ms: their limit.
    """

    def __init__(
        self, problem: Problem, nodes: Reduction, upper: float, few: frozenset[int], most_ms: float
    ) -> None:
        self._few, self._most_ms = few, most_ms
        super().__init__(problem, nodes, upper=upper)

    def most_busy(self, device: int) -> cp_model.IntVar | int:
        """Return the most that a device's load may be: the goal for the few, else the known."""
        return self.makespan if device in self._few else self.upper

    def _set_goal(self) -> None:
        self.cp.add(self.makespan <= self.steps(self._most_ms))
        super()._set_goal()


def _loads(problem: Problem, devices: Sequence[int]) -> tuple[float, ...]:
    # it has no other links than the one before
    return costs.costs_of(problem, devices).load_ms
