"""Ties under objective ``step``: the least transfer, then the best balance, with an equal step.

The micro-batches and the schedule of the best placement stay. If stages form a row, every cut
whose bound is not above the step is simulated, which proves the rank. Otherwise small changes that
keep the step are tried while they lower the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from placer.schema import TieBreaks
from placer.solver import costs
from placer.solver.cpsat import ties
from placer.solver.problem import SAME
from placer.solver.step import step_bounds, step_moves
from placer.solver.step.choices import Choice


def broken(choice: Choice, over: Callable[[], bool]) -> TieBreaks:
    """Keep the map of smallest rank that is found as the choice's own.

    Args:
        choice: the best one, with its map.
        over: asked before each map is tried; ends the search.

    Returns:
        The rank that was reached, and whether it is proven.
    """
    search = _TieSearch(choice, over)
    proven = search.all_cuts()
    if not proven:
        # First less transfer, then better balance at that transfer: the rank is compared from left
        # to right.
        search.climb(0)
        search.climb(1)
    choice.devices, choice.value = search.devices, search.best.objective_value
    return ties.ties_of(search.best, proven or ties.rank(search.best) == (0.0, 0.0))


class _TieSearch:
    """The map of smallest rank so far, and the searches for a smaller one."""

    def __init__(self, choice: Choice, over: Callable[[], bool]) -> None:
        assert choice.devices is not None
        best = costs.judged(choice.problem, choice.devices)
        assert best is not None  # it was kept
        self._choice, self._over = choice, over
        self._most_ms = choice.value * (1 + SAME)
        self.devices, self.best = choice.devices, best

    def all_cuts(self) -> bool:
        """Try every cut of a row that may be as good; whether none is left."""
        choice = self._choice
        table = step_bounds.table(choice.problem, choice.nodes, choice.bottleneck)
        if table is None:
            return False
        for bound, devices in table.cuts():
            if bound > self._most_ms:
                break
            if self._over() or devices == []:
                return False
            if devices:
                self._offer(devices)
        return True

    def climb(self, part: int) -> None:
        """Apply small changes that lower a part of the rank without raising the parts before it."""

        def value(devices: list[int]) -> float:
            self._offer(devices)
            result = self._as_good(devices)
            if result is None or ties.rank(result)[:part] > ties.rank(self.best)[:part]:
                return inf
            return ties.rank(result)[part]

        step_moves.climb(self._choice.problem, self._choice.nodes, self.devices, value, self._over)

    def _offer(self, devices: list[int]) -> None:
        result = self._as_good(devices)
        if result is not None and ties.rank(result) < ties.rank(self.best):
            self.devices, self.best = devices, result

    def _as_good(self, devices: list[int]) -> costs.Costs | None:
        result = costs.judged(self._choice.problem, devices)
        return result if result is not None and result.objective_value <= self._most_ms else None
