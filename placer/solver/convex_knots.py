"""Whether every node has a stage, where stages are contiguous: knots as in ``knots.py``, but of convex sets alone.

A decision for each node by an integer program of three stages, of which the middle one is the node's, and the only one
that counts. A stage that is found is one for all nodes in it.

    before │ S, with the node in it: no more than ``upper`` │ behind
"""

from __future__ import annotations

from dataclasses import replace

from placer.solver.cpsat import Limits
from placer.solver.knots import alone_ms, knots, least_ms
from placer.solver.problem import Problem
from placer.solver.reduce import SLACK, Reduction
from placer.solver.stages import StageModel

WORK = 0.3
"""The longest search for one stage, in the solver's own measure."""


class _KnotModel(StageModel):
    """A stage of a node that takes no longer than ``upper``, whatever comes before it and after it."""

    def __init__(self, problem: Problem, nodes: Reduction, upper: float, node: int) -> None:
        self.node = node
        fewer = replace(problem, most_devices=3, least_devices=1, most_layers=None)
        super().__init__(fewer, nodes, upper, any_will_do=True)

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
        """Left out: a node that has no stage without it has none with it."""


def some_node_has_no_stage(problem: Problem, nodes: Reduction, upper: float, limits: Limits) -> bool:
    """Whether it is proven that no contiguous placement is as good as ``upper``, from single stages.

    Args:
        problem: what is asked, of the kind that ``stage_scope.applies`` names.
        nodes: its layers, joined where they must be together.
        upper: a bottleneck, in milliseconds.
        limits: of all searches together.
    """
    if problem.request.transfers != "added":
        return False
    tight = [knot.node for knot in knots(problem, nodes)]
    waiting = dict.fromkeys([*tight, *range(len(nodes.nodes))])
    until = limits.meter.done + limits.work
    while waiting and limits.meter.done < until:
        node = next(iter(waiting))
        del waiting[node]
        if alone_ms(problem, nodes, node) <= upper * (1 + SLACK):
            continue
        answer = _KnotModel(problem, nodes, upper, node).solve(replace(limits, work=WORK, progress=None))
        if answer.infeasible:
            return True
        for layer, stage in enumerate(answer.devices or ()):
            if stage == 1:
                waiting.pop(nodes.node_of[layer], None)
    return False
