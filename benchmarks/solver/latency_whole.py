"""The least time of a subgraph where memory binds: a minimum cut whose inside fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor, inf, isfinite

from ortools.sat.python import cp_model

from .latency import Graph

UNITS_PER_MS = 1e7
"""Times are counted in these, rounded down."""

UNITS_OF_MEMORY = 2**40
"""A subgraph's memory is so many of those in which sizes are counted, rounded down."""

WORK = 2.0
"""Of one program, in CP-SAT's deterministic seconds."""

Together = tuple[int, int]
"""Two nodes: where the first is inside, so is the second."""


def least_that_fits(
    read: Graph,
    inside: frozenset[int],
    outside: frozenset[int],
    together: Iterable[Together],
    known: float,
) -> tuple[float, frozenset[int] | None]:
    """Return the least time of a subgraph that fits in memory, in ms.

    Args:
        read: the input.
        inside: nodes that the subgraph contains.
        outside: nodes that it does not contain.
        together: pairs of nodes that must be together.
        known: a known lower bound.

    Returns:
        A bound, infinite if there is no such subgraph, and the best subgraph that was found.
    """
    program = _Program(read, inside, outside, together)
    return program.solve(known)


class _Program:
    """An integer program with a literal per node, which says whether the node is inside."""

    def __init__(
        self,
        read: Graph,
        inside: frozenset[int],
        outside: frozenset[int],
        together: Iterable[Together],
    ) -> None:
        self.read, self.cp = read, cp_model.CpModel()
        barred = outside | {
            node for node, time in enumerate(read.accelerator_ms) if not isfinite(time)
        }
        self.inside: list[cp_model.IntVar | int] = [
            1 if node in inside else 0 if node in barred else self.cp.new_bool_var("")
            for node in range(len(read.ids))
        ]
        self.impossible = not inside.isdisjoint(barred)
        self._keep(together)
        self._fit()
        self._time = self._time_of_nodes() + self._transfers()

    def _keep(self, together: Iterable[Together]) -> None:
        """Keep each class, and each node for which the subgraph would wait, inside together."""
        for group in self.read.classes:
            for node in group[1:]:
                self.cp.add(self.inside[group[0]] == self.inside[node])
        for first, second in together:
            self.cp.add(self.inside[first] <= self.inside[second])

    def _fit(self) -> None:
        """Limit the inside to the memory."""
        size = [floor(UNITS_OF_MEMORY * min(2.0, one / self.read.memory)) for one in self.read.size]
        self.cp.add(cp_model.LinearExpr.weighted_sum(self.inside, size) <= UNITS_OF_MEMORY)

    def _time_of_nodes(self) -> cp_model.LinearExprT:
        times = [_units(time) if isfinite(time) else 0 for time in self.read.accelerator_ms]
        return cp_model.LinearExpr.weighted_sum(self.inside, times)

    def _transfers(self) -> cp_model.LinearExprT:
        """Return the transfers' cost.

        A value costs if its source is inside and a reader is outside, or the other way round.
        """
        costs: list[cp_model.LinearExprT] = []
        for node, readers in enumerate(self.read.readers):
            units, source = _units(self.read.transfer_ms[node]), self.inside[node]
            if not units:
                continue
            costs += self._any([(source, self.inside[reader]) for reader in readers], units)
            costs += self._any([(self.inside[reader], source) for reader in readers], units)
        return cp_model.LinearExpr.sum(costs)

    def _any(
        self, pairs: Sequence[tuple[cp_model.IntVar | int, cp_model.IntVar | int]], units: int
    ) -> list[cp_model.LinearExprT]:
        """Return the cost of pairs whose first node is inside and whose second node is outside."""
        able = [
            (one, other)
            for one, other in pairs
            if not (_is(one, 0) or _is(other, 1) or one is other)
        ]
        if not able:
            return []
        crosses = self.cp.new_bool_var("")
        for one, other in able:
            self.cp.add(one - other <= crosses)
        return [units * crosses]

    def solve(self, known: float) -> tuple[float, frozenset[int] | None]:
        """Return the bound and the subgraph."""
        if self.impossible:
            return inf, None
        if known > 0:
            self.cp.add(self._time >= _units(known * (1 - 1e-9)) - len(self.inside))
        self.cp.minimize(self._time)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = WORK
        status = solver.solve(self.cp)
        if status == cp_model.INFEASIBLE:
            return inf, None
        found = None
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            found = frozenset(
                node for node, literal in enumerate(self.inside) if solver.value(literal)
            )
        return max(known, solver.best_objective_bound / UNITS_PER_MS), found


def _is(literal: cp_model.IntVar | int, value: int) -> bool:
    return isinstance(literal, int) and literal == value


def _units(time_ms: float) -> int:
    return floor(time_ms * UNITS_PER_MS)
