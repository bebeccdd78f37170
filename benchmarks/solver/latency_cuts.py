"""The least that the subgraph of one run can take: smallest cuts, with the memory priced and the waiting in steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray
from ortools.graph.python import max_flow

from .latency import Graph

UNIT_MS = 1e-7
"""Cuts are counted in these, rounded down."""

ENDLESS = 10**14
MOST_PRICES = 10
SLACK = 1e-9

Arcs = NDArray[np.int64]
Wait = tuple[float, int, int]
"""A time, and two nodes: with the first inside and the second outside, the end waits so long for the second."""


@dataclass(frozen=True)
class Least:
    """The least time of a subgraph.

    Attributes:
        value: no subgraph takes less, in ms; infinite if there is none.
        nodes: the best that was met on the way, one that fits in memory if there was one.
        steps: what is waited for at most, and the least time of a subgraph that waits for no more; ascending, complete
            as far as the least of both together can be among them.
    """

    value: float
    nodes: frozenset[int]
    steps: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Cuts:
    """The smallest cuts of one input.

    Attributes:
        read: the input.
    """

    read: Graph

    def least(
        self, hull: frozenset[int], barred: NDArray[np.bool_], waits: Sequence[Wait] = (), since: float = 0.0
    ) -> Least:
        """The least time of a subgraph that holds the hull and no barred node.

        Args:
            hull: what is inside.
            barred: by node, whether it is outside.
            waits: what the subgraph waits for, or what waits for it, where nothing else does. A wait of t lets all
                those be outside that take no longer than t.
            since: waits up to here cost nothing.
        """
        if barred[list(hull)].any():
            return Least(inf, hull)
        best = self._priced(hull, barred, [])  # with no regard to waits: nothing takes less
        times = sorted({wait[0] for wait in waits if wait[0] > since + SLACK})
        if not times:
            return Least(best.value, best.nodes, ((since, best.value),))
        floor, best, steps = best.value, Least(inf, hull), []
        for time in [since, *times]:
            if time - since + floor >= best.value:
                steps.append((time, floor))  # whatever waits longer takes no less than that
                break
            found = self._priced(hull, barred, [wait for wait in waits if wait[0] > time])
            steps.append((time, found.value))
            if time - since + found.value < best.value:
                best = Least(time - since + found.value, found.nodes)
            if found.value <= floor:
                break
        return Least(best.value, best.nodes, tuple(steps))

    def _priced(self, hull: frozenset[int], barred: NDArray[np.bool_], kept: Sequence[Wait]) -> Least:
        """The smallest cut; if it does not fit in memory, that with the price for memory that makes it the largest.

        For any price p >= 0 the cut with p * size added to each node's time, less p * memory, is a bound. By price
        these are a concave function, which every cut touches with a line: the next price is where two lines meet.
        """
        memory = self.read.memory
        value, nodes = self._cut(hull, barred, kept, 0.0)
        over = self._size(nodes) - memory
        if over <= SLACK * memory or value == inf:
            return Least(value, nodes)
        steep, flat = (self._time(nodes), over), (self._time(hull), self._size(hull) - memory)
        if flat[1] > SLACK * memory:
            return Least(inf, hull)
        best, fitting = value, hull
        for _ in range(MOST_PRICES):
            price = (flat[0] - steep[0]) / (steep[1] - flat[1])
            bound, nodes = self._cut(hull, barred, kept, price)
            best = max(best, bound - price * memory)
            line = (self._time(nodes), self._size(nodes) - memory)
            if line[1] <= SLACK * memory:
                if self._time(nodes) < self._time(fitting):
                    fitting = nodes
                if line == flat:
                    break
                flat = line
            elif line == steep:
                break
            else:
                steep = line
        return Least(best, fitting)

    def _time(self, nodes: frozenset[int]) -> float:
        return self.read.duration_ms(nodes)

    def _size(self, nodes: frozenset[int]) -> float:
        return sum(self.read.size[node] for node in nodes)

    def _cut(
        self, hull: frozenset[int], barred: NDArray[np.bool_], kept: Sequence[Wait], price: float
    ) -> tuple[float, frozenset[int]]:
        count = len(self.read.ids)
        source, sink = 3 * count, 3 * count + 1
        tails, heads, capacities = self._crossings
        weights = np.floor((self._times + price * self._sizes) / UNIT_MS)
        weights[barred | (weights > ENDLESS)] = ENDLESS
        inside = np.fromiter(sorted(hull), np.int64)
        forced = np.array([wait[1:] for wait in kept], np.int64).reshape(-1, 2)
        flow = max_flow.SimpleMaxFlow()
        flow.add_arcs_with_capacity(
            np.concatenate([tails, np.arange(count), np.full(len(inside), source), forced[:, 0]]),
            np.concatenate([heads, np.full(count, sink), inside, forced[:, 1]]),
            np.concatenate([capacities, weights.astype(np.int64), np.full(len(inside) + len(forced), ENDLESS)]),
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
    def _sizes(self) -> NDArray[np.float64]:
        return np.array(self.read.size)

    @cached_property
    def _crossings(self) -> tuple[Arcs, Arcs, Arcs]:
        """A value costs once if its source is inside and a reader is not, and once if it is the other way round."""
        arcs: list[tuple[int, int, int]] = []
        count = len(self.read.ids)
        for node, readers in enumerate(self.read.readers):
            leaves, enters = count + node, 2 * count + node
            units = int(self.read.transfer_ms[node] / UNIT_MS)
            arcs += [(node, leaves, units), (enters, node, units)]
            for reader in readers:
                arcs += [(leaves, reader, ENDLESS), (reader, enters, ENDLESS)]
            arcs += [(node, sibling, ENDLESS) for sibling in self.read.siblings[node] if sibling != node]
        table = np.array(arcs, np.int64)
        return table[:, 0], table[:, 1], table[:, 2]


def heads(read: Graph) -> list[Wait]:
    """By value and reader, when the value is there at the earliest if another subgraph or the CPU makes it."""
    quick = [min(pair) for pair in zip(read.cpu_ms, read.accelerator_ms, strict=True)]
    end: list[float] = []
    found = []
    for node, readers in enumerate(read.readers):
        start = max((end[source] for source in read.sources[node]), default=0.0)
        end.append(start + quick[node])
        alone = start + min(read.cpu_ms[node], read.accelerator_ms[node] + read.transfer_ms[node])
        found += [(alone, reader, node) for reader in readers]
    return found


def tails(read: Graph) -> list[Wait]:
    """By value and reader, how long the last end is after the value, at least, if the reader is not with its source."""
    count = len(read.ids)
    quick = [min(pair) for pair in zip(read.cpu_ms, read.accelerator_ms, strict=True)]
    left = [0.0] * count
    found = []
    for node in reversed(range(count)):
        rest = max((left[reader] for reader in read.readers[node]), default=0.0)
        left[node] = rest + quick[node]
        for source in read.sources[node]:
            alone = min(read.cpu_ms[node], read.accelerator_ms[node] + read.transfer_ms[source])
            found.append((rest + alone, source, node))
    return found
