"""What the stage of one node costs at the least, where stages are contiguous: a knot of ``knots.py`` made convex.

An integer program of three stages, of which the middle one is the node's, and the only one that counts.
"""

from __future__ import annotations

from dataclasses import replace

from placer.solver.cpsat import Limits
from placer.solver.knots import knots, least_ms
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction
from placer.solver.stages import StageModel

MOST_KNOTS = 3
WORK = 0.6
"""The longest search for one knot, in the solver's own measure."""


class _KnotModel(StageModel):
    """The load of a node's stage, whatever comes before it and after it."""

    def __init__(self, problem: Problem, nodes: Reduction, upper: float, node: int) -> None:
        self.node = node
        super().__init__(replace(problem, most_devices=3, least_devices=1, most_layers=None), nodes, upper)

    def _windows(self) -> list[tuple[int, int]]:
        return [(1, 1) if node == self.node else (0, 2) for node in range(len(self.nodes.nodes))]

    def _choose_kinds(self) -> None:
        self.classes = [list(self.stages)]
        self.kind = [[True] for _ in self.stages]

    def _first_stages_are_used_first(self) -> None:
        """Not here: before and after may be empty."""

    def _loads(self) -> None:
        work = [(node, self.steps(least_ms(self.problem, self.nodes, node))) for node in range(len(self.nodes.nodes))]
        sent, received = self._transfers()[1]
        self.cp.add(self._sum_at(1, work) + sum(sent) + sum(received) <= self.makespan)

    def _memory(self) -> None:
        """Left out: without it the bound holds too."""


def convex_knot_bound(problem: Problem, nodes: Reduction, upper: float, bound: float, limits: Limits) -> float:
    """A lower bound on the bottleneck of contiguous placements that are no worse than ``upper``, in milliseconds.

    Args:
        problem: what is asked, of the kind that ``stage_scope.applies`` names.
        nodes: its layers, joined where they must be together.
        upper: a bottleneck that is known.
        bound: what is proven already; knots that bind less than that are left alone.
        limits: for the search of each knot.

    Returns:
        The bound; infinite if no placement is as good as ``upper``.
    """
    best = 0.0
    for knot in knots(problem, nodes)[:MOST_KNOTS]:
        if min(knot.least_ms, knot.alone_ms) < bound * (1 - 1e-9):
            break
        result = _KnotModel(problem, nodes, upper, knot.node).solve(replace(limits, work=WORK, progress=None))
        if result.infeasible and knot.alone_ms > upper:
            return float("inf")
        if not result.complete:
            break
        best = max(best, min(upper if result.infeasible else result.bound, knot.alone_ms))
    return best
