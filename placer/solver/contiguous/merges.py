"""Merging of nodes that are together in some best contiguous placement.

The merged graph has the same optimum. Two rules alternate until neither finds more:

    inseparable   u and v never part within ``upper``: the stage of v without u is some set S of
                  nodes with v in it, and the least of work(S) + transfer of the nets that S
                  cuts, a minimum cut, is more than ``upper``
    absorbed      v may as well be with u: what else v exchanges, and its work, are no more than
                  what the two exchange with nobody else:
                  work(v) + sum of transfer(e), v in e, u not  <=  transfer({u, v})

    u ══12══ v ──1── r     v moves to the stage of u: that stage trades 12 for work(v) + 1, the
          work 2           stage of v trades 12 + work(v) for 1 at most, no other sees a change

A node is absorbed only where order allows it: every direct predecessor of v is u or before u, and
every direct successor of v is u or behind u.

Source: Padberg and Rinaldi, "An efficient algorithm for the minimum capacity cut problem", 1990,
for minimum cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import inf

from placer.solver.bounds import memory_bounds
from placer.solver.bounds.min_cut_bound import MOST_PINS, Cutter, alone_ms, least_ms, nets_by_pins
from placer.solver.components import closed_groups, sources_and_readers
from placer.solver.cpsat.stage_windows import neighbourhood
from placer.solver.problem import ROUNDING, SAME, Problem
from placer.solver.reduce import Net, Reduction, joined, joined_nets
from placer.solver.values import arcs_of

Pair = tuple[int, int]


def merged(
    problem: Problem, nodes: Reduction, upper: float, over: Callable[[], bool] = lambda: False
) -> Reduction:
    """Return the nodes, fewer of them.

    Some best placement is left, if any has a bottleneck of no more than ``upper``.

    Args:
        problem: the placement problem, contiguous, by objective ``throughput``.
        nodes: its layers, joined where they must be together.
        upper: only placements whose bottleneck is no more than this are looked for, in
            milliseconds.
        over: asked now and then; ends the search for more.
    """
    if (
        problem.request.transfers != "added"
        or sum(1 + len(value.readers) for value in problem.values) > MOST_PINS
    ):
        return nodes
    weighty = _weighty(problem) if _may_draw(problem) else frozenset(range(len(problem.layers)))
    while all(nodes.allowed) and not over():
        before = nodes
        nodes = _all_drawn_over(problem, nodes, upper, weighty)
        nodes = _joined(problem, nodes, _held_together(problem, nodes, upper, over))
        if len(nodes.nodes) == len(before.nodes):
            break
    return nodes


def _joined(problem: Problem, nodes: Reduction, pairs: Iterable[Pair]) -> Reduction:
    groups = [tuple(nodes.nodes[node][0] for node in pair) for pair in pairs]
    same = [layers for layers in nodes.nodes if len(layers) > 1]
    return joined(problem, closed_groups([*same, *groups])) if groups else nodes


# Held together


def _held_together(
    problem: Problem, nodes: Reduction, upper: float, over: Callable[[], bool]
) -> list[Pair]:
    """Return pairs of neighbours that no better placement separates.

    If a placement separates them, at least one of them is on a device that pays for transfers.
    """
    if len(problem.untaxed) > 1:
        return []
    needs = _needing(problem, nodes, upper, over)
    within = upper * (1 + ROUNDING)
    # A node that pays cannot be on the device without transfers, if there is one: it is elsewhere,
    # where its stage needs the neighbour. If both need each other, one of them is elsewhere in any
    # placement that separates them.
    pays = [alone_ms(problem, nodes, node) > within for node in range(len(nodes.nodes))]
    return [
        (one, other)
        for one, other in sorted(needs)
        if pays[one] or ((other, one) in needs and (one < other or pays[other]))
    ]


def _needing(
    problem: Problem, nodes: Reduction, upper: float, over: Callable[[], bool]
) -> set[Pair]:
    """Return pairs of a node and a neighbour that shares every taxed device with it.

    A set that was found for one pair separates all pairs across its border.
    """
    nets = nets_by_pins(problem, nodes)
    work = [least_ms(problem, nodes, node) for node in range(len(nodes.nodes))]
    if not nets or not 0 < sum(work) < inf:
        return set()
    near: list[set[int]] = [set() for _ in work]
    for pins in nets:
        for node in pins:
            near[node].update(pins)
    cutter = Cutter(work, nets)
    parted: set[Pair] = set()
    needs: set[Pair] = set()
    for node, neighbours in enumerate(near):
        for other in sorted(neighbours - {node}):
            if (node, other) in parted:
                continue
            if over():
                return needs
            # The least load of a stage that has the node and lacks its neighbour.
            value, members = cutter.least([node], [other])
            if value > upper * (1 + ROUNDING):
                needs.add((node, other))
                continue
            inside = set(members)
            parted.update((member, outer) for member in members for outer in near[member] - inside)
    return needs


# Drawn over


def _all_drawn_over(
    problem: Problem, nodes: Reduction, upper: float, weighty: frozenset[int]
) -> Reduction:
    while len(weighty) < len(problem.layers):
        pairs = _Draw(problem, nodes, upper, weighty).pairs()
        if not pairs:
            break
        nodes = _joined(problem, nodes, pairs)
    return nodes


def _may_draw(problem: Problem) -> bool:
    """Return whether a device more or less, and a layer more or less on one, are all the same."""
    return (
        problem.one_link is not None and problem.least_devices == 1 and problem.most_layers is None
    )


def _weighty(problem: Problem) -> frozenset[int]:
    """Return the layers that take memory that could matter."""
    layers = problem.layers
    if not memory_bounds.can_bind(problem):
        return frozenset()
    # Activations or workspace count too: moving any layer may break a limit.
    if not memory_bounds.holds_state_alone(problem):
        return frozenset(range(len(layers)))
    copied = {layer for shared in problem.shared for layer in shared.others}
    held = {
        index for index, layer in enumerate(layers) if memory_bounds.state_bytes(problem, layer)
    }
    return frozenset(held | copied)


@dataclass
class _Draw:
    """Which nodes of a graph may as well be where a neighbour is; none with a weighty layer."""

    problem: Problem
    nodes: Reduction
    upper: float
    weighty: frozenset[int]

    def pairs(self) -> list[Pair]:
        """Return disjoint pairs of a node and a neighbour that may as well join it."""
        found: list[Pair] = []
        used: set[int] = set()
        for node, nets in enumerate(self._nets_of):
            if node in used or not nets or not self.weighty.isdisjoint(self.nodes.nodes[node]):
                continue
            pins = {pin for net in nets for pin in (net.source, *net.readers)}
            centre = next((u for u in sorted(pins - used - {node}) if self._draws(u, node)), None)
            if centre is not None:
                found.append((centre, node))
                used |= {centre, node}
        return found

    def _draws(self, centre: int, node: int) -> bool:
        """Return whether the node may as well be where the centre is."""
        if not self.nodes.allowed[centre] <= self.nodes.allowed[node]:
            return False
        if not self._in_order(centre, node):
            return False
        growth = self._growth(centre, node)
        if growth is None:
            return False
        gain, more_there, more_here = growth
        # Neither stage may become slower. The stage that the node leaves must not pay for more than
        # it saves. The stage of the centre gets the node's work too, on every device that is quick
        # enough for the centre. A device without transfers saves nothing.
        return more_here <= gain * (1 + SAME) and all(
            self._work(node, device) + (0.0 if device in self.problem.untaxed else more_there)
            <= (0.0 if device in self.problem.untaxed else gain) * (1 + SAME)
            for device in self.nodes.allowed[centre]
            if self._work(centre, device) <= self.upper * (1 + ROUNDING)
        )

    def _growth(self, centre: int, node: int) -> tuple[float, float, float] | None:
        """Return what transfers change in ms if the node moves to the stage of the centre.

        Returns:
            The transfers that both stages save, and those that either stage gets in addition. None
            if a third stage would pay.
        """
        gain, more_there, more_here = 0.0, 0.0, 0.0
        for net in self._nets_of[node]:
            time_ms = net.there_ms + net.back_ms
            with_centre = centre == net.source or centre in net.readers
            if len(net.readers) == 1 and with_centre:
                gain += time_ms
            elif len(net.readers) == 1 or (self.problem.multicast and not net.back_ms):
                more_there += 0.0 if with_centre else time_ms
                more_here += 0.0 if with_centre else time_ms
            elif net.source == node:  # it pays once for each stage that reads
                more_there += time_ms * (len(net.readers) - 2 if with_centre else len(net.readers))
                more_here += 0.0 if with_centre else time_ms
            elif not with_centre:  # a third stage would pay
                return None
        return gain, more_there, more_here

    def _in_order(self, centre: int, node: int) -> bool:
        before, behind = (bits[centre] for bits in self._neighbourhood)
        sources, readers = (of[node] for of in self._sources_and_readers)
        return all(before >> other & 1 for other in sources) and all(
            behind >> other & 1 for other in readers
        )

    def _work(self, node: int, device: int) -> float:
        return self.problem.work_ms(self.nodes.nodes[node], device)

    @cached_property
    def _nets_of(self) -> list[list[Net]]:
        nets_of: list[list[Net]] = [[] for _ in self.nodes.nodes]
        for net in joined_nets(self.problem, self.nodes):
            for node in (net.source, *net.readers):
                nets_of[node].append(net)
        return nets_of

    @cached_property
    def _sources_and_readers(self) -> tuple[list[list[int]], list[list[int]]]:
        arcs = self.nodes.arcs(arcs_of(self.problem.values))
        return sources_and_readers(len(self.nodes.nodes), arcs)

    @cached_property
    def _neighbourhood(self) -> tuple[list[int], list[int]]:
        return neighbourhood(self.problem, self.nodes)
