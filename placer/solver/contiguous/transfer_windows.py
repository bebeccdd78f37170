"""Windows of stages that account for transfers: the first stage at which a node can be.

If node v is at stage p, so is all that it depends on and that cannot be earlier. Node v can be
there only if::

    needed(v, p)  =  v and all before v that no stage before p can hold
    min over S with needed(v, p) in S of (work(S) + transfer of the nets that S cuts)  <=  upper

This is a minimum cut. S holds no node that is known to be behind p, or before it. A node that fails
rules out all nodes behind it, and a node that passes admits all before it, so few cuts decide a
stage. Stages on devices that pay for no transfer are few, and their number so far is counted too.
The last stages are the first stages of the reversed graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from placer.solver.bounds.min_cut_bound import Cutter, alone_ms, least_ms, nets_by_pins
from placer.solver.cpsat.stage_windows import members, neighbourhood, stage_windows
from placer.solver.problem import ROUNDING, Problem
from placer.solver.reduce import Reduction

Windows = list[tuple[int, int]]

MOST_PINS = 4_000
"""Pins of nets above which the minimum cuts of all stages take too long."""


def narrowed_windows(problem: Problem, nodes: Reduction, upper: float) -> Windows:
    """Return, by node, the first and the last stage that it can be at in a contiguous placement.

    Args:
        problem: the placement problem, by objective ``throughput``.
        nodes: its layers in nodes, in topological order.
        upper: no stage may take longer, in milliseconds.

    Returns:
        The windows; one that ends before it begins says that there is no such placement.
    """
    windows = stage_windows(problem, nodes, upper)
    reach = _reach(problem, nodes, upper) if upper > 0 else None
    before = None
    while reach is not None and windows != before:
        before, windows = windows, reach.narrowed(windows)
        if any(first > last for first, last in windows):
            break
    return windows


def _reach(problem: Problem, nodes: Reduction, upper: float) -> _Reach | None:
    count = len(nodes.nodes)
    nets = nets_by_pins(problem, nodes)
    work = [least_ms(problem, nodes, node) for node in range(count)]
    pins = sum(map(len, nets))
    if problem.request.transfers != "added" or pins > MOST_PINS or not 0 < sum(work) < inf:
        return None
    alone = [alone_ms(problem, nodes, node) for node in range(count)]
    before, behind = neighbourhood(problem, nodes)
    within = upper * (1 + ROUNDING)
    return _Reach(
        Cutter(work, nets),
        alone,
        len(problem.untaxed),
        before,
        behind,
        problem.most_devices,
        within,
    )


@dataclass
class _Reach:
    """A graph, and what a stage may take.

    Attributes:
        cutter: finds the least load of a stage with some nodes, and without others.
        alone: by node, its work on the fastest device that pays for no transfer.
        untaxed: how many of these there are.
        before: by node, itself and all that it depends on, as bits.
        behind: by node, itself and all that depend on it.
        stages: how many there may be.
        within: no stage may take longer.
    """

    cutter: Cutter
    alone: Sequence[float]
    untaxed: int
    before: Sequence[int]
    behind: Sequence[int]
    stages: int
    within: float

    def narrowed(self, windows: Windows) -> Windows:
        """Return narrower windows, if there are any."""
        firsts = self._firsts([first for first, _ in windows], [last for _, last in windows])
        turned = replace(self, before=self.behind, behind=self.before)
        flipped = turned._firsts(
            [self.stages - 1 - last for _, last in windows], [self.stages - 1 - f for f in firsts]
        )
        return [
            (first, self.stages - 1 - turn) for first, turn in zip(firsts, flipped, strict=True)
        ]

    def _firsts(self, known: list[int], lasts: list[int]) -> list[int]:
        """Return, by node, its first stage, from what is known.

        ``stages`` where it can be at none.
        """
        fewer: list[int] | None = None
        # with so many stages, at the most, that pay for no transfer
        for _ in range(self.untaxed + 1):
            firsts = list(known)
            for stage in range(self.stages):
                away = [
                    node for node, first in enumerate(known) if first > stage or lasts[node] < stage
                ]
                with self.cutter.without(away):
                    self._decide(stage, firsts, fewer)
            fewer = firsts
        return firsts

    def _decide(self, stage: int, firsts: list[int], fewer: list[int] | None) -> None:
        """Move nodes that cannot be at a stage, or before, to the next."""
        count = len(firsts)
        late = sum(1 << node for node in range(count) if firsts[node] >= stage)
        # If the stages before this one do without one of the devices that pay for no transfer, this
        # stage may be on it. Then more nodes are late, but the stage pays for its work alone.
        late_with_fewer = sum(
            1 << node for node in range(count) if fewer is not None and fewer[node] >= stage
        )
        undecided = [node for node in range(count) if firsts[node] == stage]
        while undecided:
            node = undecided[len(undecided) // 2]
            passed = self._passes(self.before[node] & late)
            if passed is None and fewer is not None:
                passed = self._passes_untaxed(node, self.before[node] & late_with_fewer)
            if passed is None:
                for other in undecided:
                    if self.behind[node] >> other & 1:
                        firsts[other] = stage + 1
                undecided = [other for other in undecided if firsts[other] == stage]
            else:
                # All nodes before a node that passes, pass. So do nodes in the set of the cut whose
                # late predecessors are all in it: the same set is a stage for them.
                removed = self.before[node]
                undecided = [
                    other
                    for other in undecided
                    if not removed >> other & 1
                    and (not passed >> other & 1 or self.before[other] & late & ~passed)
                ]

    def _passes_untaxed(self, node: int, needed: int) -> int | None:
        """Return the node, as a bit, if a device without transfers can hold what is needed."""
        time_ms = sum(self.alone[other] for other in members(needed))
        return 1 << node if time_ms <= self.within else None

    def _passes(self, needed: int) -> int | None:
        """Return the nodes, as bits, of a stage with those that are needed.

        The result is None if it takes too long.
        """
        value, found = self.cutter.least(members(needed))
        return sum(1 << node for node in found) if value <= self.within else None
