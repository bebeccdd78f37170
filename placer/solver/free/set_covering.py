"""The set-covering program of ``column_generation.py``, with its duals kept in a box."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ortools.linear_solver import pywraplp

from placer.solver.problem import ROUNDING

Owned = tuple[int, frozenset[int]]
"""Whose set, and its nodes."""

MOST_WIDENED = 6
"""The most times that the box of prices is widened in a solution."""
FIRST_HALF = 0.15
"""Half the width of the first box, as a part of a group's mean price."""


class Covering:
    """A linear program that sets join.

    Nodes are in groups, a row each: what sets hold of a group, by the prices of its nodes, comes to
    the whole of it; or a slack adds to it at the upper end of the group's box, or takes off at the
    lower end. So duals lie in the box.

    Args:
        groups: the nodes of each.
        prices: by node, above 0; of the groups they are the middle of the box.
        counts: how many devices there are of each kind. All kinds grow alike: sets of one come to
            its share of all.
        free: how many devices pay for no transfer: each holds one set at no cost.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        prices: Sequence[float],
        counts: Sequence[int],
        free: int,
    ) -> None:
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self._ends = self._solver.infinity()
        self._rows = [self._solver.Constraint(1, 1) for _ in groups]
        self._owners = [self._solver.Constraint(-self._ends, 0) for _ in counts]
        self._owners += [self._solver.Constraint(-self._ends, 1) for _ in range(free)]
        self._goal = self._solver.Objective()
        self._goal.SetMinimization()
        every = self._column({})
        self._goal.SetCoefficient(every, 1.0)
        for row, count in zip(self._owners, counts, strict=False):
            row.SetCoefficient(every, -count / sum(counts))
        self._known: set[Owned] = set()
        self._group_of = {node: group for group, nodes in enumerate(groups) for node in nodes}
        whole = [sum(prices[node] for node in nodes) for nodes in groups]
        self._share = {node: prices[node] / whole[group] for node, group in self._group_of.items()}
        self._more = [self._column({group: 1.0}) for group in range(len(groups))]
        self._less = [self._column({group: -1.0}) for group in range(len(groups))]
        self._half = FIRST_HALF * sum(whole) / len(groups)
        self._widened = 0
        self.centre(prices)

    def centre(self, prices: Sequence[float]) -> None:
        """Move the box."""
        self._middle = [0.0] * len(self._rows)
        for node, group in self._group_of.items():
            self._middle[group] += prices[node]
        self._box()

    def widen(self) -> bool:
        """Make the box twice as wide; whether it may be."""
        self._widened += 1
        self._half *= 2
        self._box()
        return self._widened <= MOST_WIDENED

    def _box(self) -> None:
        for price, more, less in zip(self._middle, self._more, self._less, strict=True):
            self._goal.SetCoefficient(more, price + self._half)
            self._goal.SetCoefficient(less, self._half - price)

    def leans(self) -> bool:
        """Return whether some dual of the last solution is at an end of its box."""
        return any(slack.solution_value() > ROUNDING for slack in (*self._more, *self._less))

    def join(self, sets: Iterable[Owned]) -> bool:
        """Add sets, each with its owner.

        A kind, or behind those a device that pays for no transfer; if any is new.
        """
        fresh = [one for one in sets if one[1] and one not in self._known]
        for owner, nodes in fresh:
            parts: dict[int, float] = defaultdict(float)
            for node in nodes:
                parts[self._group_of[node]] += self._share[node]
            self._owners[owner].SetCoefficient(self._column(parts), 1.0)
        self._known.update(fresh)
        return bool(fresh)

    def solve(self) -> tuple[float, list[float]] | None:
        """Return the least number of sets, in fractions, and the duals' prices; None on failure."""
        if self._solver.Solve() != self._solver.OPTIMAL:
            return None
        duals = [row.dual_value() for row in self._rows]
        prices = [
            duals[self._group_of[node]] * self._share[node] for node in range(len(self._share))
        ]
        return self._goal.Value(), prices

    def _column(self, parts: Mapping[int, float]) -> pywraplp.Variable:
        column = self._solver.NumVar(0, self._ends, "")
        for group, part in parts.items():
            self._rows[group].SetCoefficient(column, part)
        return column
