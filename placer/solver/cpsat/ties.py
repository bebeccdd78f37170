"""Ties: among placements with an equal objective, prefer less transfer, then better balance.

    transfer   sum of send(d) + receive(d) over all devices, in milliseconds
    spread     the largest compute(d) less the smallest, over the devices that hold layers, in ms

Two searches follow the one for the objective. The first looks for placements that reach it with as
little transfer as possible. The second looks for those with no more transfer and as small a spread
as possible. Under objective ``devices``, placements on equally few devices are equal; see
``step_ties.py`` for objective ``step``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import floor, isclose

from placer.schema import TieBreaks
from placer.schema.base import PROVEN_GAP
from placer.solver import costs
from placer.solver.cpsat.model import PlacementModel, worth_building
from placer.solver.cpsat.runner import Answer, Limits
from placer.solver.cpsat.variables import TIME_STEPS, longest_ms
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction, reduced

WORK = 8.0
"""Work of each of the two searches, in the measure of ``cpsat.runner.Meter``."""


DIGITS = 12
"""Significant digits of transfers that count: sums in another order differ beyond them."""

Rank = tuple[float, float]


def rank(result: costs.Costs) -> Rank:
    """Return the transfer and the spread of a placement.

    Of two with the same objective, the one with the smaller rank is better.
    """
    busy = [result.compute_ms[device] for device in result.stages]
    transfer_ms = sum(result.send_ms) + sum(result.receive_ms)
    return float(f"{transfer_ms:.{DIGITS}g}"), max(busy) - min(busy)


def broken(
    problem: Problem,
    best: list[int],
    limits: Callable[[float], Limits],
    offer: Callable[[list[int] | None], list[int]],
    most: float | None = None,
) -> TieBreaks:
    """Search for the smallest rank among placements that are as good as the best.

    Args:
        problem: the placement problem.
        best: by layer, its device.
        limits: makes limits for a search of some work.
        offer: keeps a placement if it is as good and of smaller rank; returns the kept one.
        most: placements with at most this objective are as good; by default, the best one's.

    Returns:
        The rank that was reached, and whether it is proven.
    """
    found = costs.costs_of(problem, best)
    most = found.objective_value if most is None else most
    nodes = reduced(problem, most)

    def is_time() -> bool:
        return worth_building(problem, nodes, limits(WORK).time_s)

    if not is_time():
        return ties_of(found, proven=False)
    # The rank is lexicographic: first the least transfer, then with it the least spread.
    best, transfer_proven = _least(
        _TieModel(problem, nodes, most, None), problem, best, limits, offer, 0
    )
    if not is_time():
        return ties_of(costs.costs_of(problem, best), proven=False)
    model = _TieModel(problem, nodes, most, rank(costs.costs_of(problem, best))[0])
    best, spread_proven = _least(model, problem, best, limits, offer, 1)
    # For a device that may recompute, the program underestimates the time, so its smallest spread
    # is not proven.
    known = "auto" not in problem.recompute
    return ties_of(
        costs.costs_of(problem, best), proven=transfer_proven and spread_proven and known
    )


def unbroken(problem: Problem, devices: list[int]) -> TieBreaks | None:
    """Return the rank of a reported placement before ties are broken, or None if not required."""
    return (
        ties_of(costs.costs_of(problem, devices), proven=False)
        if problem.request.break_ties
        else None
    )


def ties_of(found: costs.Costs, proven: bool) -> TieBreaks:
    """Return the reported rank of a placement."""
    transfer_ms, imbalance_ms = rank(found)
    return TieBreaks(transfer_ms=transfer_ms, imbalance_ms=imbalance_ms, proven=proven)


def _least(
    model: _TieModel,
    problem: Problem,
    best: list[int],
    limits: Callable[[float], Limits],
    offer: Callable[[list[int] | None], list[int]],
    part: int,
) -> tuple[list[int], bool]:
    """Return the best of one search, and whether its part of the rank is proven."""
    model.hint(best)
    result: Answer = model.solve(limits(WORK))
    best = offer(result.devices)
    found = costs.costs_of(problem, best)
    scale = max(sum(found.compute_ms), rank(found)[part])
    return best, isclose(result.bound, rank(found)[part], rel_tol=0.0, abs_tol=PROVEN_GAP * scale)


class _TieModel(PlacementModel):
    """Placements that are as good as one that is known.

    Args:
        problem: the placement problem.
        nodes: its layers, joined where they must be together.
        most: the objective of that placement.
        most_ms: transfers may take no more than this, and the spread is made small; None: transfers
            are.
    """

    def __init__(
        self, problem: Problem, nodes: Reduction, most: float, most_ms: float | None
    ) -> None:
        self._most_ms = most_ms
        self._steps_per_ms = TIME_STEPS / max(longest_ms(problem), 1e-9)
        super().__init__(problem, nodes, upper=most)

    def steps(self, time_ms: float) -> int:
        """Return a time in the model's unit, rounded down; where bytes are the objective too."""
        return (
            floor(time_ms * self._steps_per_ms)
            if self.objective == "memory"
            else super().steps(time_ms)
        )

    def _set_goal(self) -> None:
        compute, send, receive = self.load_parts
        transfer = sum(term for terms in (*send, *receive) for term in terms)
        if self._most_ms is None:
            self.cp.minimize(transfer)
            return
        self.cp.add(transfer <= floor(self._most_ms * (1 + 10.0 ** (1 - DIGITS)) * self._scale))
        most = max(1, sum(self.steps(sum(row)) for row in self._compute_ms()))
        longest, shortest = (self.cp.new_int_var(0, most, name) for name in ("longest", "shortest"))
        for device in self.placed:
            held = self.any_on(range(len(self.x)), device)
            if held is not None:
                self.cp.add(longest >= sum(compute[device]))
                self.cp.add(shortest <= sum(compute[device])).only_enforce_if(held)
        self.cp.minimize(longest - shortest)

    def _compute_ms(self) -> list[list[float]]:
        """Return, by node, the time of each of its layers on the slowest device."""
        devices = range(len(self.problem.devices))
        return [
            [max(self.problem.compute_ms(n, d) for d in devices) for n in node]
            for node in self.nodes.nodes
        ]

    @property
    def _scale(self) -> float:
        return self._steps_per_ms if self.objective == "memory" else self.steps_per_ms

    def in_unit(self, bound: float) -> float:
        """Return a bound in milliseconds."""
        return max(0.0, bound) / self._scale
