"""A lower bound of the time of one run's subgraph.

It comes from minimum cuts that fit in memory, with waits in steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray
from ortools.graph.python import max_flow

from .latency import Graph
from .latency_whole import least_that_fits

UNIT_MS = 1e-7
"""Cuts are counted in these, rounded down."""

ENDLESS = 10**14
SLACK = 1e-9

Arcs = NDArray[np.int64]
Arc = tuple[int, int]
Wait = tuple[float, int, int]
"""A time, and two nodes: with the first inside and the second outside, the end waits so long for
the second."""


@dataclass(frozen=True)
class Least:
    """The least time of a subgraph.

    Attributes:
        value: a lower bound of every subgraph's time in ms; infinite if there is no subgraph.
        nodes: the best subgraph found, one that fits in memory if there was one.
        steps: pairs of a longest wait and the least time of a subgraph that waits no longer, in
            ascending order. Pairs that cannot minimise the sum of both may be missing.
    """

    value: float
    nodes: frozenset[int]
    steps: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Cuts:
    """The minimum cuts of one input.

    Attributes:
        read: the input.
    """

    read: Graph

    def least(
        self,
        hull: frozenset[int],
        barred: NDArray[np.bool_],
        waits: Sequence[Wait] = (),
        since: float = 0.0,
    ) -> Least:
        """Return the least time of a subgraph that contains the hull and no barred node.

        Args:
            hull: the nodes inside.
            barred: by node, whether it is outside.
            waits: the waits of the subgraph for outside nodes, or of outside nodes for it. A wait
                of t allows all nodes outside that need no more than t.
            since: waits up to this time cost nothing.
        """
        if barred[list(hull)].any():
            return Least(inf, hull)
        # without waits, no subgraph takes less
        best = self._fitting(hull, barred, [])
        times = sorted({wait[0] for wait in waits if wait[0] > since + SLACK})
        if not times:
            return Least(best.value, best.nodes, ((since, best.value),))
        floor, best, steps = best.value, Least(inf, hull), []
        for time in [since, *times]:
            if time - since + floor >= best.value:
                # a subgraph with longer waits takes at least as long
                steps.append((time, floor))
                break
            found = self._fitting(hull, barred, [wait for wait in waits if wait[0] > time])
            steps.append((time, found.value))
            if time - since + found.value < best.value:
                best = Least(time - since + found.value, found.nodes)
            if found.value <= floor:
                break
        return Least(best.value, best.nodes, tuple(steps))

    def with_sources(self) -> dict[Arc, float]:
        """Return, by arc, the least time of a subgraph with its source and without its reader."""
        return self._apart(self.read.readers, lambda source, reader: (source, reader))

    def with_readers(self) -> dict[Arc, float]:
        """Return, by arc, the least time of a subgraph with its reader and without its source."""
        return self._apart(self.read.sources, lambda reader, source: (source, reader))

    def _apart(
        self, near: Sequence[Sequence[int]], arc: Callable[[int, int], Arc]
    ) -> dict[Arc, float]:
        """Return, by a node and a neighbour, the least time with the first and without the second.

        Memory is not limited here.
        """
        found: dict[Arc, float] = {}
        for node, others in enumerate(near):
            with_node, barred = frozenset(self.read.siblings[node]), np.zeros(len(near), np.bool_)
            least, inside = self._cut(with_node, barred, [])
            for other in others:
                value = least
                if other in inside:
                    barred[other] = True
                    value = inf if other in with_node else self._cut(with_node, barred, [])[0]
                    barred[other] = False
                found[arc(node, other)] = value
        return found

    def _fitting(
        self, hull: frozenset[int], barred: NDArray[np.bool_], kept: Sequence[Wait]
    ) -> Least:
        """Return the minimum cut, or the least cut that fits if the minimum cut does not."""
        memory = self.read.memory * (1 + SLACK)
        hull = self._closed(hull, kept)
        if self._size(hull) > memory:
            return Least(inf, hull)
        value, nodes = self._cut(hull, barred, kept)
        if value == inf or self._size(nodes) <= memory:
            return Least(value, nodes)
        outside = frozenset(int(node) for node in np.flatnonzero(barred))
        value, fitting = least_that_fits(
            self.read, hull, outside, [wait[1:] for wait in kept], value
        )
        return Least(value, hull if fitting is None else fitting)

    def _closed(self, nodes: frozenset[int], kept: Sequence[Wait]) -> frozenset[int]:
        """Return the nodes with all nodes that must be with them."""
        bound: dict[int, list[int]] = defaultdict(list)
        for _, inside, drawn in kept:
            bound[inside].append(drawn)
        found: set[int] = set()
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += [*bound[node], *self.read.siblings[node]]
        return frozenset(found)

    def _size(self, nodes: frozenset[int]) -> float:
        return sum(self.read.size[node] for node in nodes)

    def _cut(
        self, hull: frozenset[int], barred: NDArray[np.bool_], kept: Sequence[Wait]
    ) -> tuple[float, frozenset[int]]:
        count = len(self.read.ids)
        source, sink = 3 * count, 3 * count + 1
        tails, heads, capacities = self._crossings
        weights = np.floor(self._times / UNIT_MS)
        weights[barred | (weights > ENDLESS)] = ENDLESS
        inside = np.fromiter(sorted(hull), np.int64)
        forced = np.array([wait[1:] for wait in kept], np.int64).reshape(-1, 2)
        flow = max_flow.SimpleMaxFlow()
        flow.add_arcs_with_capacity(
            np.concatenate([tails, np.arange(count), np.full(len(inside), source), forced[:, 0]]),
            np.concatenate([heads, np.full(count, sink), inside, forced[:, 1]]),
            np.concatenate(
                [capacities, weights.astype(np.int64), np.full(len(inside) + len(forced), ENDLESS)]
            ),
        )
        if flow.solve(source, sink) != flow.OPTIMAL:
            raise ArithmeticError("no smallest cut was found")
        if flow.optimal_flow() >= ENDLESS:
            return inf, hull
        found = frozenset(int(node) for node in flow.get_source_side_min_cut() if node < count)
        return flow.optimal_flow() * UNIT_MS, found | hull

    @cached_property
    def _times(self) -> NDArray[np.float64]:
        return np.array(self.read.accelerator_ms)

    @cached_property
    def _crossings(self) -> tuple[Arcs, Arcs, Arcs]:
        """Return the arcs of the cut network for values that cross the border.

        A value costs once if its source is inside and a reader is outside, and once in the other
        direction.
        """
        arcs: list[tuple[int, int, int]] = []
        count = len(self.read.ids)
        for node, readers in enumerate(self.read.readers):
            leaves, enters = count + node, 2 * count + node
            units = int(self.read.transfer_ms[node] / UNIT_MS)
            arcs += [(node, leaves, units), (enters, node, units)]
            for reader in readers:
                arcs += [(leaves, reader, ENDLESS), (reader, enters, ENDLESS)]
            arcs += [
                (node, sibling, ENDLESS) for sibling in self.read.siblings[node] if sibling != node
            ]
        table = np.array(arcs, np.int64)
        return table[:, 0], table[:, 1], table[:, 2]


def heads(read: Graph, ahead_ms: Sequence[float], alone_ms: Mapping[Arc, float]) -> list[Wait]:
    """Return, by value and reader, the earliest time of the value if it comes from outside.

    It is made by another subgraph or by the CPU.

    Args:
        read: the input.
        ahead_ms: by node, a lower bound of the time when its value is there.
        alone_ms: by arc, the least time of a subgraph with its source and without its reader.
    """
    quick = [min(pair) for pair in zip(read.cpu_ms, read.accelerator_ms, strict=True)]
    chain: list[float] = []
    there: list[float] = []
    found = []
    for node, readers in enumerate(read.readers):
        ready = max((there[source] for source in read.sources[node]), default=0.0)
        ready_alone = max((chain[source] for source in read.sources[node]), default=0.0)
        chain.append(ready_alone + quick[node])
        there.append(max(chain[node], ready, ahead_ms[node]))
        sent = ready_alone + read.accelerator_ms[node] + read.transfer_ms[node]
        for reader in readers:
            on_accelerator = max(sent, there[node], alone_ms[node, reader])
            found.append((min(ready + read.cpu_ms[node], on_accelerator), reader, node))
    return found


def tails(read: Graph, alone_ms: Mapping[Arc, float]) -> list[Wait]:
    """Return, by value and reader, the least time from the value to the last end.

    The reader is not in the same subgraph as its source.

    Args:
        read: the input.
        alone_ms: by arc, the least time of a subgraph with its reader and without its source.
    """
    count = len(read.ids)
    quick = [min(pair) for pair in zip(read.cpu_ms, read.accelerator_ms, strict=True)]
    left = [0.0] * count
    found = []
    for node in reversed(range(count)):
        rest = max((left[reader] for reader in read.readers[node]), default=0.0)
        left[node] = rest + quick[node]
        for source in read.sources[node]:
            taken = max(
                rest + read.accelerator_ms[node] + read.transfer_ms[source], alone_ms[source, node]
            )
            found.append((min(rest + read.cpu_ms[node], taken), source, node))
    return found
