"""A proven lower bound on the latency: the best that the longest path through the graph could do.

    path      p0  p1  p2 | p3  p4  p5  p6 | p7 | p8 ...
              CPU CPU CPU|   subgraph     |CPU | subgraph

No path may leave and re-enter a subgraph. So a subgraph meets the path in one run of its nodes, and
the path waits for the whole subgraph. The subgraph contains every node between two nodes of the
run, the run's *hull*. It pays for each value that must cross: a value made before the run and read
in the hull, and a value made in the hull and read behind it. A node next to the path is either
inside and takes time, or outside and its values cross. The cheaper choice is a minimum cut; the
first estimate uses the run alone.

The bound is the smallest sum over all ways to cut the path into at most as many runs as there are
accelerators, each of which fits in memory, with CPU nodes between them.

Nodes outside may be late: on the CPU a node starts when the last path node ahead of it is done, for
which no bound is known at first. So bounds come in rounds, each with the times that the round
before proved for the path's nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from .latency import Graph
from .latency_cuts import Cuts, Wait, heads, tails

Table = NDArray[np.float64]
Run = tuple[int, int]

MOST_CUTS = 3000
SLACK = 1e-9
WORTH = 1e-7
"""Another round follows one that made the bound larger by more than this share."""


@dataclass(frozen=True)
class Proof:
    """A bound, and the subgraphs that would attain it if nothing else delayed them.

    Attributes:
        bound: the bound on the latency, in ms.
        subgraphs: disjoint sets of nodes.
    """

    bound: float
    subgraphs: tuple[frozenset[int], ...]


def path_bound(read: Graph, until: float = inf) -> Proof:
    """Return the bound from the path that is longest on the CPU.

    Args:
        read: the input.
        until: the time of the monotonic clock at which it stops with the bound so far.
    """
    return _PathBound(read, until).proof()


class _PathBound:
    """The dynamic program over the runs of one path.

    Attributes:
        path: the nodes of the path.
        ahead: by node, the last position on the path from which it is reachable; -1 if none is.
        behind: by node, the first position on the path that it reaches; the path's length if none.
        cost: by the first and last position of a run, a lower bound of the subgraph's time;
            infinite if the run is impossible.
        exact: the runs with a minimum cut, and their best subgraphs.
        waiting: by last and first position of runs that wait, pairs of a wait and the time with it,
            as in ``Least.steps``.
        waited: by first position of cut runs that reach the end, their time with all nodes that
            wait for them.
    """

    def __init__(self, read: Graph, until: float) -> None:
        self.read, self._until = read, until
        self.path = _longest(read)
        count = len(read.ids)
        place = {node: index for index, node in enumerate(self.path)}
        self.ahead = [place.get(node, -1) for node in range(count)]
        self.behind = [place.get(node, len(self.path)) for node in range(count)]
        for node in range(count):
            self.ahead[node] = max(
                [self.ahead[node], *(self.ahead[source] for source in read.sources[node])]
            )
        for node in reversed(range(count)):
            self.behind[node] = min(
                [self.behind[node], *(self.behind[reader] for reader in read.readers[node])]
            )
        self.cost = self._first_costs()
        self._ahead, self._behind = np.array(self.ahead), np.array(self.behind)
        self.cuts = Cuts(read)
        self._with_sources = self.cuts.with_sources()
        self.tails = tails(read, self.cuts.with_readers())
        self.heads: list[Wait] = []
        self.exact: dict[Run, frozenset[int]] = {}
        self.waiting: list[dict[int, tuple[tuple[float, float], ...]]] = [{} for _ in self.path]
        self.waited: dict[int, float] = {}
        self._made = 0

    def proof(self) -> Proof:
        """Return the bound after rounds of cuts.

        A bound implies when each node of the path is done, and so how long other nodes wait for it.
        """
        known = 0.0
        while True:
            best, runs = self._best()
            self.heads = heads(self.read, self._ahead_ms(best), self._with_sources)
            self.exact.clear()
            runs = self._cut_all()
            bound = float(self._best()[0][-1, -1])
            if bound <= known * (1 + WORTH) or self._over():
                return Proof(max(bound, known), tuple(self._subgraph(run) for run in runs))
            known = bound

    def _cut_all(self) -> list[Run]:
        """Repeat the recurrence and cut the runs that it uses, until all used runs are cut."""
        while True:
            best, runs = self._best()
            new = [run for run in runs if run not in self.exact]
            if not new or self._over():
                return runs
            for run in new:
                self._cut(run, float(best[-1, run[0]]))

    def _over(self) -> bool:
        return self._made > MOST_CUTS or monotonic() > self._until

    def _ahead_ms(self, best: Table) -> list[float]:
        """Return, by node, the earliest end of the last path node from which it is reachable."""
        # the node may be in a run that ends later
        done = np.minimum.accumulate(best[-1, -2:0:-1])[::-1]
        return [float(done[place]) if place >= 0 else 0.0 for place in self.ahead]

    def _subgraph(self, run: Run) -> frozenset[int]:
        return self.exact[run] if run in self.exact else self._hull(run)

    def _hull(self, run: Run) -> frozenset[int]:
        """Return the nodes between the run's nodes, and the nodes that must be with them."""
        first, last = run
        inside = (
            n for n in range(len(self.ahead)) if self.ahead[n] >= first and self.behind[n] <= last
        )
        return frozenset(sibling for node in inside for sibling in self.read.siblings[node])

    def _first_costs(self) -> Table:
        """Return, by run, the hull's time and certain transfers; infinite if it does not fit."""
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
        """Return, by run, transfers of values made before it, or made in it and read behind it."""
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
        """Return the earliest ends by most runs and position, and the best runs.

        The entry of a position bounds the time at which all nodes before it are done; the last
        entry is the last end.
        """
        length, most = len(self.path), self.read.accelerators
        best = np.full((most + 1, length + 2), inf)
        best[:, 0] = 0.0
        came = np.full((most + 1, length + 2), -1)
        for column in range(1, length + 2):
            end = min(column, length)
            best[:, column] = best[:, end - 1] + self.read.cpu_ms[self.path[end - 1]]
            through = self._through(best, end, self.waited if column > length else {})
            first = through.argmin(axis=1)
            value = through[np.arange(most), first]
            better = np.flatnonzero(value < best[1:, column])
            best[better + 1, column] = value[better]
            came[better + 1, column] = first[better]
        return best, list(self._runs(came))[::-1]

    def _through(self, best: Table, end: int, waited: Mapping[int, float]) -> Table:
        """Return, by number of earlier runs and first position, the end of a run up to ``end``.

        At the path's end, the time includes all nodes that wait for the run.
        """
        through: Table = best[:-1, :end] + self.cost[:end, end - 1]
        for first, steps in self.waiting[end - 1].items():
            ends = np.min(
                [np.maximum(best[:-1, first], time) + value for time, value in steps], axis=0
            )
            through[:, first] = np.maximum(through[:, first], ends)
        for first, value in waited.items():
            through[:, first] = np.maximum(through[:, first], best[:-1, first] + value)
        return through

    def _runs(self, came: NDArray[np.int64]) -> Iterator[Run]:
        length = len(self.path)
        used, column = self.read.accelerators, length + 1
        while column:
            end, first = min(column, length), int(came[used, column])
            if first >= 0:
                yield first, end - 1
                used, column = used - 1, first
            else:
                column = end - 1

    def _cut(self, run: Run, since: float) -> None:
        """Find the least time of the run's subgraph, and its waits if it starts at ``since``."""
        first, last = run
        self._made += 1
        barred, hull = (self._behind < first) | (self._ahead > last), self._hull(run)
        found = self.cuts.least(hull, barred, self.heads, since)
        self.exact[run] = found.nodes
        if len(found.steps) > 1:
            self.waiting[last][first] = found.steps
        else:
            self.cost[run] = max(self.cost[run], found.value)
        if last == len(self.path) - 1:
            found = self.cuts.least(hull, barred, self.tails)
            self.waited[first] = found.value
            self.exact[run] = found.nodes


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
    """Return, by run, the sum of the entries [i, j] with i >= first and j <= last."""
    return np.cumsum(np.cumsum(table[::-1], axis=0)[::-1], axis=1)
