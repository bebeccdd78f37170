"""A proven lower bound on the latency: the best that the longest path through the graph could do by itself.

    path      p0  p1  p2 | p3  p4  p5  p6 | p7 | p8 ...
              CPU CPU CPU|   subgraph     |CPU | subgraph

A subgraph that no path may leave and re-enter meets a path in one run of its nodes, and the path waits for all of it.
It holds whatever lies between two nodes of the run, its *hull*, and pays for what is bound to cross: a value made
before the run and read in the hull, and one made in the hull and read past it. What lies beside the path is inside and
takes time, or is outside and what crosses costs: the cheaper, a smallest cut, where the first reckoning used the run.
So the smallest sum over all ways to cut the path into at most as many runs as there are accelerators, each of which
fits in memory, and nodes on the CPU between them, is a bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from .latency import Graph
from .latency_cuts import Cuts, heads, tails

Table = NDArray[np.float64]
Run = tuple[int, int]

MOST_CUTS = 3000
SLACK = 1e-9


@dataclass(frozen=True)
class Proof:
    """A bound, and the subgraphs that would attain it if nothing else stood in the way.

    Attributes:
        bound: on the latency, in ms.
        subgraphs: disjoint sets of nodes.
    """

    bound: float
    subgraphs: tuple[frozenset[int], ...]


def path_bound(read: Graph) -> Proof:
    """The bound of the path that is longest on the CPU."""
    return _PathBound(read).proof()


class _PathBound:
    """The dynamic program over the runs of one path.

    Attributes:
        path: its nodes.
        ahead: by node, the last place on the path from which it is reached; -1 if there is none.
        behind: by node, the first place on the path that it reaches; the path's length if there is none.
        cost: by the first and last place of a run, no more than what the subgraph takes; infinite if it cannot be.
        exact: the runs that were cut, and their best subgraphs.
        waiting: by last and first place of those that wait, how long and what they take then, as ``Least.steps``.
    """

    def __init__(self, read: Graph) -> None:
        self.read = read
        self.path = _longest(read)
        count = len(read.ids)
        place = {node: index for index, node in enumerate(self.path)}
        self.ahead = [place.get(node, -1) for node in range(count)]
        self.behind = [place.get(node, len(self.path)) for node in range(count)]
        for node in range(count):
            self.ahead[node] = max([self.ahead[node], *(self.ahead[source] for source in read.sources[node])])
        for node in reversed(range(count)):
            self.behind[node] = min([self.behind[node], *(self.behind[reader] for reader in read.readers[node])])
        self.cost = self._first_costs()
        self._ahead, self._behind = np.array(self.ahead), np.array(self.behind)
        self.cuts, self.heads, self.tails = Cuts(read), heads(read), tails(read)
        self.exact: dict[Run, frozenset[int]] = {}
        self.waiting: list[dict[int, tuple[tuple[float, float], ...]]] = [{} for _ in self.path]

    def proof(self) -> Proof:
        """Reckon, cut what was used, and reckon again until all that is used was cut."""
        while True:
            prefix, runs = self._best()
            new = [run for run in runs if run not in self.exact]
            if not new or len(self.exact) > MOST_CUTS:
                return Proof(float(prefix[-1]), tuple(self._subgraph(run) for run in runs))
            for run in new:
                self._cut(run, float(prefix[run[0]]))

    def _subgraph(self, run: Run) -> frozenset[int]:
        return self.exact[run] if run in self.exact else self._hull(run)

    def _hull(self, run: Run) -> frozenset[int]:
        """What is between the run's nodes, and what must be with it."""
        first, last = run
        inside = (n for n in range(len(self.ahead)) if self.ahead[n] >= first and self.behind[n] <= last)
        return frozenset(sibling for node in inside for sibling in self.read.siblings[node])

    def _first_costs(self) -> Table:
        """By run, the hull's time and the transfers that cannot be avoided; infinite where it does not fit."""
        length = len(self.path)
        time, size = np.zeros((2, length, length))
        for node in range(len(self.read.ids)):
            if self.ahead[node] >= 0 and self.behind[node] < length:
                time[self.ahead[node], self.behind[node]] += self.read.accelerator_ms[node]
                size[self.ahead[node], self.behind[node]] += self.read.size[node]
        whole = _dominated(time) + self._transfers()
        whole[_dominated(size) > self.read.memory * (1 + SLACK)] = inf
        whole[np.tril_indices(length, -1)] = inf
        return whole

    def _transfers(self) -> Table:
        """By run, those of values whose source is before it, or whose reader is past it."""
        read, length = self.read, len(self.path)
        found = np.zeros((length, length))
        for node, readers in enumerate(read.readers):
            ahead, behind = self.ahead[node], self.behind[node]
            if ahead >= 0 and behind < length:
                past = max((self.ahead[reader] for reader in readers), default=0)
                found[: ahead + 1, behind:past] += read.transfer_ms[node]
            for first in range(behind + 1, length):
                ends = [self.behind[reader] for reader in readers if self.ahead[reader] >= first]
                if not ends:
                    break
                found[first, min(ends) :] += read.transfer_ms[node]
        return found

    def _best(self) -> tuple[Table, list[Run]]:
        """By place, the smallest sum of all before it; and the runs of the whole path's."""
        length, most = len(self.path), self.read.accelerators
        best = np.full((most + 1, length + 1), inf)
        best[:, 0] = 0.0
        came = np.full((most + 1, length + 1), -1)
        for end in range(1, length + 1):
            best[:, end] = best[:, end - 1] + self.read.cpu_ms[self.path[end - 1]]
            through = best[:-1, :end] + self.cost[:end, end - 1]
            for first, steps in self.waiting[end - 1].items():
                through[:, first] = np.min(
                    [np.maximum(best[:-1, first], time) + value for time, value in steps], axis=0
                )
            first = through.argmin(axis=1)
            value = through[np.arange(most), first]
            better = np.flatnonzero(value < best[1:, end])
            best[better + 1, end] = value[better]
            came[better + 1, end] = first[better]
        return best[most], list(self._runs(came))[::-1]

    def _runs(self, came: NDArray[np.int64]) -> Iterator[Run]:
        used, end = self.read.accelerators, len(self.path)
        while end:
            first = int(came[used, end])
            if first >= 0:
                yield first, end - 1
                used, end = used - 1, first
            else:
                end -= 1

    def _cut(self, run: Run, since: float) -> None:
        """Find what the run's subgraph takes at least, and what it waits for if it starts at ``since``."""
        first, last = run
        barred = (self._behind < first) | (self._ahead > last)
        at_end = last == len(self.path) - 1 and first > 0
        found = self.cuts.least(self._hull(run), barred, self.tails if at_end else self.heads, 0.0 if at_end else since)
        self.exact[run] = found.nodes
        self.cost[run] = max(self.cost[run], found.value)
        if len(found.steps) > 1 and not at_end:
            self.waiting[last][first] = found.steps


def _longest(read: Graph) -> list[int]:
    end = [0.0] * len(read.ids)
    before = [-1] * len(read.ids)
    for node, sources in enumerate(read.sources):
        before[node] = max(sources, key=end.__getitem__, default=-1)
        end[node] = read.cpu_ms[node] + (end[before[node]] if sources else 0.0)
    path = [max(range(len(end)), key=end.__getitem__)]
    while before[path[-1]] >= 0:
        path.append(before[path[-1]])
    return path[::-1]


def _dominated(table: Table) -> Table:
    """By run, the sum of what is reached from its first place or a later one, and reaches its last or an earlier."""
    return np.cumsum(np.cumsum(table[::-1], axis=0)[::-1], axis=1)
