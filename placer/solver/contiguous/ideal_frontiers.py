"""Frontiers: all ideals that the first p stages of a contiguous placement can hold together.

An ideal is a set of nodes that contains all that its nodes depend on. Windows of stages decide most
nodes: those whose last stage is before p are in every ideal of frontier p, those whose first stage
is p or later in none. The other nodes are taken or left in topological order. A choice is dropped
as soon as its nodes are too much for p stages, or the remaining nodes too much for the other
stages::

    last < p          first < p <= last          first >= p
    in all      │  a taken ─┬─ b taken ...   │   in none
                │           └─ b left  ...   │
                │  a left ─── c taken ...    │   b needs a
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placer.solver.chain.optimal_cuts import ROWS
from placer.solver.components import sources_and_readers
from placer.solver.contiguous.transfer_windows import Windows
from placer.solver.problem import ROUNDING, Problem
from placer.solver.reduce import Reduction, joined_nets
from placer.solver.values import arcs_of

Bools = NDArray[np.bool_]
Vector = NDArray[np.float64]
Table = NDArray[np.float64]
Counts = NDArray[np.float32]

MOST_IDEALS = 25_000
"""The most ideals of a frontier: their pairs would take seconds."""

SMALL_PRODUCT, SMALL_SUMS = 2**18, 2**13
"""The most multiplications of a matrix product, and of a matrix by a column, on one core. Larger
blocks start threads, whose synchronisation costs more than they save."""

TALL = 32
"""Rows of a block of a product, where they are not too long."""


class Graph:
    """Nodes in topological order, what they need and the nets between them.

    Args:
        problem: the placement problem; its links are all alike.
        nodes: its layers, joined where they must be together.
        windows: by node, the first and the last stage that it can be at.
        left_out: unordered nodes that every ideal holds and no net touches.

    Attributes:
        needs: by node, those that it reads from.
        pins: by node and net, whether the net has a pin there.
        size: by net, how many pins it has.
        cost_ms: by net, what it costs each stage that it touches where it is cut, at the least.
    """

    def __init__(
        self,
        problem: Problem,
        nodes: Reduction,
        windows: Windows,
        left_out: Collection[int] = (),
    ) -> None:
        self.count = len(nodes.nodes)
        arcs = sorted(nodes.arcs(arcs_of(problem.values)))
        self.needs, _ = sources_and_readers(self.count, arcs)
        self.first, self.last = along(arcs, windows)
        for node in left_out:
            self.first[node] = self.last[node] = 0
        costs: dict[tuple[int, ...], float] = {}
        for net in joined_nets(problem, nodes):
            pins = tuple(sorted({net.source, *net.readers}.difference(left_out)))
            if len(pins) > 1:
                costs[pins] = costs.get(pins, 0.0) + net.there_ms + net.back_ms
        self.cost_ms = np.array(list(costs.values()))
        self.pins = np.zeros((self.count, len(costs)), np.float32)
        for place, members in enumerate(costs):
            self.pins[list(members), place] = 1
        self.size = self.pins.sum(axis=0)


def along(arcs: Sequence[tuple[int, int]], windows: Windows) -> tuple[list[int], list[int]]:
    """Return first and last stages so that no node is before its needs or behind its readers."""
    first, last = [list(ends) for ends in zip(*windows, strict=True)]
    # ascending sources, so that each is final when it is passed on
    for source, reader in arcs:
        first[reader] = max(first[reader], first[source])
    for source, reader in reversed(arcs):
        last[source] = min(last[source], last[reader])
    return first, last


@dataclass(frozen=True)
class Frontier:
    """Some ideals, which differ in few nodes.

    Attributes:
        graph: whose.
        must: by node, whether all ideals hold it.
        free: the nodes that some of them may hold and some not.
        taken: by ideal and free node, whether it holds it.
    """

    graph: Graph
    must: Bools
    free: NDArray[np.int64]
    taken: Bools

    def __len__(self) -> int:
        return len(self.taken)

    def held(self, nets: NDArray[np.int64]) -> Counts:
        """Return, by ideal and each of some nets, how many pins of the net the ideal has."""
        counts: Counts = product(
            self.taken.astype(np.float32), self.graph.pins[np.ix_(self.free, nets)]
        )
        return counts + self.fixed[nets]

    @cached_property
    def fixed(self) -> Counts:
        """The number of the net's pins that all ideals have, by net."""
        counts: Counts = self.graph.pins[self.must].sum(axis=0)
        return counts

    @property
    def common(self) -> Bools:
        """True for the nodes that all ideals hold, by node."""
        nodes = self.must.copy()
        nodes[self.free] = self.taken.all(axis=0)
        return nodes

    @cached_property
    def unlike(self) -> Bools:
        """True for the nets of which ideals may have different numbers of pins, by net."""
        return np.asarray(self.graph.pins[self.free].any(axis=0), np.bool_)

    @cached_property
    def cut_ms(self) -> Vector:
        """The cost of the nets that the ideal cuts, by ideal."""
        nets = np.flatnonzero(self.unlike)
        held, fixed = self.held(nets), self.fixed
        cut = _weights((held > 0) & (held < self.graph.size[nets]), self.graph.cost_ms[nets])
        return cut + float(
            self.graph.cost_ms[(fixed > 0) & (fixed < self.graph.size) & ~self.unlike].sum()
        )

    def sums(self, weights: Vector) -> Vector:
        """Return, by ideal, the weight of its nodes."""
        return _weights(self.taken, weights[self.free]) + float(weights[self.must].sum())

    def some(self, which: Bools | NDArray[np.int64] | slice) -> Frontier:
        """Return some of them."""
        return Frontier(self.graph, self.must, self.free, self.taken[which])

    def ideal(self, place: int) -> Bools:
        """Return, by node, whether one of them holds it."""
        nodes = self.must.copy()
        nodes[self.free] = self.taken[place]
        return nodes

    @cached_property
    def whole(self) -> int | None:
        """The place of the ideal that holds all nodes, or None."""
        places = np.flatnonzero(self.taken.all(axis=1))
        all_known = int(self.must.sum()) + len(self.free) == self.graph.count
        return int(places[0]) if all_known and len(places) else None


@dataclass(frozen=True)
class Range:
    """What ideals may weigh.

    Attributes:
        weights: by node.
        least: an ideal weighs at least this.
        most: or at most this.
    """

    weights: Vector
    least: float
    most: float


def next_frontier(before: Frontier, stage: int, ranges: Sequence[Range]) -> Frontier | None:
    """Return the ideals that the stages before one can hold together; None if they are too many.

    Args:
        before: those that the stages before its last can hold.
        stage: how many stages there are before.
        ranges: of what they weigh, in several ways.
    """
    graph = before.graph
    must = (np.array(graph.last) < stage) | before.common
    free = [node for node in range(graph.count) if graph.first[node] < stage and not must[node]]
    place = {node: index for index, node in enumerate(free)}
    weights = np.array([one.weights for one in ranges]).T
    slack = ROUNDING * weights.sum(axis=0)
    least, most = (
        np.array([one.least for one in ranges]) - slack,
        np.array([one.most for one in ranges]) + slack,
    )
    taken, done, to_come = (
        np.zeros((1, len(free)), np.bool_),
        weights[must].sum(axis=0)[None],
        weights[free].sum(axis=0),
    )
    for index, node in enumerate(free):
        # A node may join an ideal only if all its inputs are in it. Inputs outside `place` are in
        # every ideal already.
        able = taken[:, [place[need] for need in graph.needs[node] if need in place]].all(axis=1)
        larger = taken[able]
        larger[:, index] = True
        taken, done = (
            np.concatenate([taken, larger]),
            np.concatenate([done, done[able] + weights[node]]),
        )
        to_come = to_come - weights[node]
        # Prune a partial choice if it is already too heavy, or if all remaining nodes would leave
        # it too light.
        within = ((done <= most) & (done + to_come >= least)).all(axis=1)
        taken, done = taken[within], done[within]
        if len(taken) > MOST_IDEALS:
            return None
    return Frontier(graph, must, np.array(free, np.int64), taken)


def blocks(
    begins: Vector, ends: Vector, most: float, slack: float
) -> tuple[list[tuple[slice, slice]], int]:
    """Return ranges of ideals and of their possible successors, and the number of pairs in all.

    Args:
        begins: the work of the ideals, ascending.
        ends: the work of the later ideals, ascending.
        most: the most work that a stage can add.
        slack: the rounding error of sums of work.
    """
    # The possible successors of a block of rows are one range of columns:
    #     begins   |--rows--|            successors have between begins[start] and
    #     ends     ....|-----------|...   begins[stop - 1] + most
    found, pairs = [], 0
    for start in range(0, len(begins), ROWS):
        stop = min(start + ROWS, len(begins))
        first = int(np.searchsorted(ends, begins[start] - slack))
        last = int(np.searchsorted(ends, begins[stop - 1] + most + slack, side="right"))
        if last > first:
            found.append((slice(start, stop), slice(first, last)))
            pairs += (stop - start) * (last - first)
    return found, pairs


class Between:
    """What is between the ideals of two frontiers, as what a stage holds.

    Args:
        before: the frontier before the stage.
        behind: the one behind it.
    """

    def __init__(self, before: Frontier, behind: Frontier) -> None:
        self._before, self._behind = before, behind
        self._sums: dict[bytes, tuple[Vector, Vector]] = {}
        graph = before.graph
        unlike = before.unlike | behind.unlike
        start, end = before.fixed, behind.fixed
        touched = (start < end) & ~((start == 0) & (end == graph.size)) & ~unlike
        nets = np.flatnonzero(unlike)
        self._cost_ms, self._size = graph.cost_ms[nets], graph.size[nets]
        here, there = before.held(nets), behind.held(nets)
        self._rows = (
            float(graph.cost_ms[touched].sum() + self._cost_ms.sum())
            - (here == self._size) @ self._cost_ms
        )
        self._columns = (there == 0) @ self._cost_ms
        self._match(here, there)
        self._outside()

    def _match(self, here: Counts, there: Counts) -> None:
        """Prepare the comparison of pins: equal numbers, or none here and all there."""
        left, right = [here == 0], [there == self._size]
        costs = [self._cost_ms]
        # Matrix products compare many pairs of ideals at once: one column for each net and possible
        # number of pins, and the product of two indicator matrices counts the matches.
        for number in range(1, int(self._size.max(initial=1))):
            nets = np.flatnonzero(self._size > number)
            left.append(here[:, nets] == number)
            right.append(there[:, nets] == number)
            costs.append(self._cost_ms[nets])
        ones, others, cost_ms = (
            np.concatenate(left, 1),
            np.concatenate(right, 1),
            np.concatenate(costs),
        )
        # A column that holds for every ideal on one side depends on the other side only, so it
        # leaves the product.
        always = ones.all(axis=0)
        self._columns = self._columns + others[:, always] @ cost_ms[always]
        ones, others, cost_ms = ones[:, ~always], others[:, ~always], cost_ms[~always]
        always = others.all(axis=0)
        self._rows = self._rows - ones[:, always] @ cost_ms[always]
        used = ones.any(axis=0) & others.any(axis=0) & ~always
        self._left, self._right = (
            ones[:, used] * cost_ms[used],
            others[:, used].T.astype(np.float64),
        )

    def _outside(self) -> None:
        """Prepare the test whether one ideal is within the other."""
        before, behind = self._before, self._behind
        has = before.must.copy()
        has[before.free] |= before.taken.any(axis=0)
        lacks = ~behind.must
        lacks[behind.free] &= ~behind.taken.all(axis=0)
        # Only these nodes can make an earlier ideal not a subset of a later one.
        nodes = np.flatnonzero(has & lacks)
        self._has, self._lacks = _members(before, nodes), (1 - _members(behind, nodes)).T

    def transfers(self, rows: slice, columns: slice) -> Table:
        """Return, by some ideals and some later ones, the transfers of the stage.

        Infinite if the one is not within the other.

        A net costs the stage nothing if it has no pin there, or all. As one ideal is within the
        other, that is so where both have as many pins of the net, or the one none and the other
        all.
        """
        same = product(self._left[rows], self._right[:, columns])
        table: Table = self._rows[rows, None] - self._columns[columns] - same
        table[product(self._has[rows], self._lacks[:, columns]) > 0] = inf
        return table

    def weight(self, rows: slice, columns: slice, weights: Vector) -> Table:
        """Return, by some ideals and some later ones, the weight of what is between."""
        key = weights.tobytes()
        if key not in self._sums:
            self._sums[key] = self._before.sums(weights), self._behind.sums(weights)
        before, behind = self._sums[key]
        table: Table = behind[None, columns] - before[rows, None]
        return table


def product(left: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
    """Return the product of two matrices, in parts so small that each is made on one core."""
    (rows, inner), columns = left.shape, right.shape[1]
    small = SMALL_PRODUCT if columns > 1 else SMALL_SUMS
    if rows * inner * columns <= small:
        return np.asarray(left @ right)
    found = np.empty((rows, columns), np.result_type(left, right))
    width = max(1, min(columns, small // (inner * TALL)))
    height = max(1, small // (inner * width))
    for top in range(0, rows, height):
        for first in range(0, columns, width):
            part = slice(top, top + height), slice(first, first + width)
            found[part] = left[part[0]] @ right[:, part[1]]
    return found


def _weights(chosen: Bools, weights: Vector) -> Vector:
    """Return, by row, the weight of what is chosen."""
    return product(chosen.astype(np.float64), weights[:, None])[:, 0]


def _members(front: Frontier, nodes: NDArray[np.int64]) -> Counts:
    """Return, by ideal and each of some nodes, 1 if it holds it, else 0."""
    place = np.full(front.graph.count, -1)
    place[front.free] = np.arange(len(front.free))
    found = np.zeros((len(front), len(nodes)), np.float32)
    found[:, front.must[nodes]] = 1
    free = place[nodes] >= 0
    found[:, free] = front.taken[:, place[nodes[free]]]
    return found
