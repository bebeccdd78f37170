"""Windows of stages of known class: which nodes the first stages certainly, or possibly, hold.

    classes     fast  fast  slow  fast      surely[p]  nodes that the first p stages hold in
    stages       0     1     2     3                   any placement
    surely      {}    {a}  {a,b}  ...       maybe[p]   nodes that they hold in some placement
                                            at stage p: of maybe[p + 1] less surely[p]

Node v can be at stage p only if the least load of a stage with it is within the bottleneck. This is
a minimum cut, as in ``transfer_windows.py``. A stage holds what it must. With each node it holds
all that the node needs and earlier stages cannot hold, and all that needs the node and later stages
cannot hold.

**Costs of values** that cross between classes. A stage pays for each net that it shares with other
stages. If it has the source, it pays over the link to each later stage with a reader. If it has a
reader, it pays over the link from the earlier stage with the source. The stages of the other ends
are known only as windows, so the least cost is that over the best link to any of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from ortools.graph.python import max_flow

from placer.schema import Link
from placer.solver.cpsat.variables import TIME_STEPS
from placer.solver.problem import ROUNDING, Problem
from placer.solver.reduce import Reduction
from placer.solver.values import Value

Bools = NDArray[np.bool_]
Vector = NDArray[np.float64]


class ClassNets:
    """The values as nets of nodes, and their costs between classes.

    Args:
        problem: the placement problem; every device pays for its transfers.
        nodes: its layers, joined where they must be together.
        never_ms: the time of a transfer without a link.

    Attributes:
        pins: by net and node, whether the net has a pin there.
        costs_ms: by net, class of the source and class of a reader, the least cost to both.
    """

    def __init__(self, problem: Problem, nodes: Reduction, never_ms: float) -> None:
        classes = problem.alike_devices()
        links = [[_between(problem, one, other) for other in classes] for one in classes]
        found: dict[tuple[int, tuple[int, ...], bool], Vector]
        found = defaultdict(lambda: np.zeros((len(classes), len(classes))))
        for value in problem.values:
            source = nodes.node_of[value.source]
            readers = tuple(sorted(nodes.holding(value.readers) - {source}))
            if readers:
                found[source, readers, value.bound_readers == value.readers] += _costs_ms(
                    value, links, never_ms, problem.request.transfers == "overlapped"
                )
        self.costs_ms = np.minimum(
            np.array(list(found.values())).reshape(-1, len(classes), len(classes)), never_ms
        )
        self._sources = np.array([source for source, _, _ in found], np.int64)
        self._ordered = np.array([ordered for _, _, ordered in found], np.bool_)[:, None]
        ends = [readers for _, readers, _ in found]
        self._readers = np.array([reader for readers in ends for reader in readers], np.int64)
        self._begins = np.cumsum([0, *map(len, ends)])[:-1].astype(np.int64)
        self._count = len(nodes.nodes)
        self._once = problem.multicast

    @cached_property
    def pins(self) -> Bools:
        """True where the net has a pin at the node, by net and node."""
        pins = np.zeros((len(self._sources), self._count), np.bool_)
        pins[np.arange(len(pins)), self._sources] = True
        sizes = np.diff(self._begins, append=len(self._readers))
        pins[np.repeat(np.arange(len(pins)), sizes), self._readers] = True
        return pins

    def least_ms(
        self, kind: int, here: Bools, earlier: Bools, later: Bools, fixed: Sequence[Bools]
    ) -> Vector:
        """Return, by net, its least cost to a stage if it is cut and has a pin there.

        Args:
            kind: the stage's class.
            here: by node, whether it can be at the stage.
            earlier: by node and class, whether it can be at an earlier stage of that class.
            later: by node and class, whether it can be at a later stage of that class.
            fixed: by class, the nodes that are certainly at another stage, stage by stage.
        """
        before, behind = earlier[self._sources], self._any_reader(later)
        if not self._ordered.all():
            before = np.where(self._ordered, before, before | later[self._sources])
            behind = np.where(self._ordered, behind, behind | self._any_reader(earlier))
        readers_here = self._any_reader(here[:, None])
        sent = np.where(behind & here[self._sources, None], self.costs_ms[:, kind, :], np.inf).min(
            axis=1
        )
        if not self._once:
            sent = np.maximum(sent, self._sent_for_sure(kind, fixed))
        received = np.where(before & readers_here, self.costs_ms[:, :, kind], np.inf).min(axis=1)
        least = np.minimum(sent, received)
        return np.where(np.isfinite(least), least, 0.0)

    def _sent_for_sure(self, kind: int, fixed: Sequence[Bools]) -> Vector:
        """Return, by net, what the source's stage sends to stages that certainly have a reader."""
        total = np.zeros(len(self._sources))
        for other, nodes in enumerate(fixed):
            total += self.costs_ms[:, kind, other] * self._any_reader(nodes).sum(axis=1)
        return total

    def _any_reader(self, which: Bools) -> Bools:
        """Return, by net, whether any of its readers is one of some nodes, in each column."""
        if not len(self._begins):
            return np.zeros((0, which.shape[1]), np.bool_)
        found: Bools = np.logical_or.reduceat(which[self._readers], self._begins, axis=0)
        return found


def _between(problem: Problem, ones: Sequence[int], others: Sequence[int]) -> list[Link]:
    """Return the link from devices of one class to devices of another.

    All are alike, as devices of a class may be swapped.
    """
    links = (problem.links[one][other] for one in ones for other in others if one != other)
    return [link for link in links if link is not None]


def _costs_ms(
    value: Value, links: Sequence[Sequence[list[Link]]], never_ms: float, overlapped: bool
) -> Vector:
    """Return, by the classes of source and reader, the times of a value and its gradient."""

    def least(between: Sequence[Link], size: int) -> float:
        return min(
            (0.0 if overlapped else link.transfer_ms(size) for link in between), default=never_ms
        )

    def both(source: int, reader: int) -> float:
        back = least(links[reader][source], value.gradient_bytes) if value.gradient_bytes else 0.0
        return least(links[source][reader], value.bytes) + back

    return np.array(
        [[both(source, reader) for reader in range(len(links))] for source in range(len(links))]
    )


Steps = NDArray[np.int64]


ENDLESS = 512 * TIME_STEPS
"""Capacity that no cut reaches, in steps of the bottleneck."""


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order, on classes of devices.

    Attributes:
        works: by class and node, its work there in milliseconds; infinite if it may not be there.
        arcs: by number, a node and one that reads from it.
        before: by node, whether each is itself or one that it depends on.
        nets: what crosses.
        windows: by node, the first and the last stage that it can be at, whatever the classes.
    """

    works: Vector
    arcs: NDArray[np.int64]
    before: Bools
    nets: ClassNets
    windows: Sequence[tuple[int, int]]


class Windows:
    """What the first stages can hold, for classes of the stages that are known.

    Args:
        graph: whose nodes.
        order: by stage, its class.
        upper_ms: no stage may take longer.

    Attributes:
        maybe: by number of first stages, the nodes that they may hold.
        surely: by number of first stages, the nodes that they hold in any case.
        possible: whether there may be a placement.
        cuts: how many minimum cuts were looked at.
    """

    def __init__(self, graph: Graph, order: Sequence[int], upper_ms: float) -> None:
        self.graph, self.order, self.upper_ms = graph, order, upper_ms
        firsts, lasts = np.array(graph.windows, np.int64).reshape(-1, 2).T
        numbers = np.arange(len(order) + 1)[:, None]
        self.maybe: Bools = firsts[None, :] < numbers
        self.surely: Bools = lasts[None, :] < numbers
        self.possible = bool((firsts <= lasts).all())
        self.cuts = 0

    def narrow(self) -> None:
        """Go over the stages, forwards and backwards, until no window gets narrower."""
        stages, known = range(len(self.order)), None
        while self.possible and known != self._known:
            known = self._known
            for stage in (*stages, *reversed(stages)):
                self._narrow_at(stage)
                if not self.possible:
                    return

    @property
    def _known(self) -> int:
        return int(self.surely.sum()) - int(self.maybe.sum())

    def here(self, stage: int) -> Bools:
        """Return, by node, whether it can be at a stage."""
        return np.asarray(self.maybe[stage + 1] & ~self.surely[stage])

    def least_ms(self, stage: int) -> Vector:
        """Return, by net, what it costs a stage at the least if it is cut there."""
        stages = range(len(self.order))
        earlier, later = self._on(stages[:stage]), self._on(stages[stage + 1 :])
        sure = self.surely[1:] & ~self.maybe[:-1]
        fixed = [
            sure[[other for other in stages if other != stage and self.order[other] == kind]].T
            for kind in range(len(self.graph.works))
        ]
        return self.graph.nets.least_ms(self.order[stage], self.here(stage), earlier, later, fixed)

    def _on(self, stages: range) -> Bools:
        """Return, by node and class, whether it can be at one of some stages, of that class."""
        found = np.zeros((self.maybe.shape[1], len(self.graph.works)), np.bool_)
        for stage in stages:
            found[:, self.order[stage]] |= self.here(stage)
        return found

    def stages_of(self) -> list[tuple[int, int]]:
        """Return, by node, the first and the last stage that it can be at."""
        firsts, lasts = (~self.maybe).sum(axis=0) - 1, (~self.surely).sum(axis=0) - 1
        return list(zip(firsts.tolist(), lasts.tolist(), strict=True))

    def _narrow_at(self, stage: int) -> None:
        """Return the nodes that cannot be at a stage: too early for them, or too late."""
        # The nodes that are at this stage for sure, and the others for which it is the first
        # possible stage, or the last.
        fixed = self.surely[stage + 1] & ~self.maybe[stage]
        earliest = self.maybe[stage + 1] & ~self.maybe[stage] & ~fixed
        latest = self.surely[stage + 1] & ~self.surely[stage] & ~fixed
        if not (fixed.any() or earliest.any() or latest.any()):
            return
        cutter = _StageCutter(self, stage, fixed)
        if fixed.any() and cutter.least() is None:
            self.possible = False
        else:
            self.maybe[stage + 1] &= ~self._unable(cutter, earliest, self.graph.before.T)
            self.surely[stage] |= self._unable(cutter, latest, self.graph.before)
            self.possible = not (self.surely & ~self.maybe).any()
        self.cuts += cutter.cuts

    def _unable(self, cutter: _StageCutter, candidates: Bools, with_it: Bools) -> Bools:
        """Return the nodes, of some, that cannot be at the stage.

        If a node cannot be there, neither can the nodes that come with it.
        """
        undecided = candidates & ~cutter.held
        unable = candidates & cutter.too_heavy
        undecided &= ~unable
        while undecided.any():
            # The middle node decides about most others: if it fails, so do all that come with it,
            # and if it passes, so does the whole set that was found.
            nodes = np.flatnonzero(undecided)
            node = int(nodes[len(nodes) // 2])
            found = cutter.least(node)
            if found is None:
                unable |= with_it[node] & undecided
                undecided &= ~with_it[node]
            else:
                undecided[found] = False
        return unable


class _StageCutter:
    """The least load of a stage: a minimum cut among the nodes that can be there.

    Args:
        windows: what is known of where nodes are.
        stage: which.
        fixed: the nodes that are there for sure.

    Attributes:
        held: by node, whether it was in a set that the stage can hold.
        too_heavy: by node, whether it cannot be there, as what is there with it is more work than
            may be.
        cuts: how many minimum cuts were looked at.
    """

    def __init__(self, windows: Windows, stage: int, fixed: Bools) -> None:
        self._free = np.flatnonzero(windows.here(stage))
        self._within = windows.upper_ms * (1 + ROUNDING)
        self._steps_per_ms = TIME_STEPS / self._within
        self.cuts = 0
        self.held = np.zeros(len(fixed), np.bool_)
        self._place = np.full(len(fixed), -1)
        self._place[self._free] = np.arange(len(self._free))
        work = windows.graph.works[windows.order[stage]]
        self.too_heavy = self._heavy(windows, stage, fixed, work)
        self._flow = max_flow.SimpleMaxFlow()
        self._sink, self._origin, self._next = (
            len(self._free),
            len(self._free) + 1,
            len(self._free) + 2,
        )
        origins = np.where(fixed[self._free], ENDLESS, 0)
        self._arcs(np.full(len(self._free), self._origin), np.arange(len(self._free)), origins)
        self._nets(windows.graph.nets.pins, windows.least_ms(stage), work)
        self._order(windows, stage)

    def _heavy(self, windows: Windows, stage: int, fixed: Bools, work: Vector) -> Bools:
        """Return, by node, whether it is too long for the stage, with all that comes with it."""
        free = self._free
        able = np.floor(np.minimum(work * self._steps_per_ms, 2 * TIME_STEPS)).astype(np.int64)
        late = np.flatnonzero(windows.here(stage) & ~windows.maybe[stage] & ~fixed)
        early = np.flatnonzero(windows.here(stage) & windows.surely[stage + 1] & ~fixed)
        before = windows.graph.before
        # whole numbers, which no other core is waited for
        needed = before[np.ix_(free, late)] @ able[late]
        needing = before[np.ix_(early, free)].T @ able[early]
        alone = np.where(fixed[free], 0, able[free])
        heavy = np.zeros(len(fixed), np.bool_)
        heavy[free] = (
            able[fixed].sum() + np.maximum(alone, np.maximum(needed, needing)) > TIME_STEPS
        )
        return heavy

    def _arcs(
        self, tails: NDArray[np.int64], heads: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> None:
        self._flow.add_arcs_with_capacity(
            tails.astype(np.int32), heads.astype(np.int32), steps.astype(np.int64)
        )

    def _nets(self, pins: Bools, cost_ms: Vector, work: Vector) -> None:
        """Add the arcs for work and for cut nets.

        If a pin of a net is elsewhere for sure, the net costs time with the first pin here.
        """
        here = pins[:, self._free]
        size = here.sum(axis=1)
        touched = np.flatnonzero((size > 0) & (cost_ms > 0))
        steps = np.floor(np.minimum(cost_ms * self._steps_per_ms, ENDLESS)).astype(np.int64)
        outside = pins.sum(axis=1) > size
        able = np.floor(np.minimum(work[self._free] * self._steps_per_ms, ENDLESS)).astype(np.int64)
        single = touched[outside[touched] & (size[touched] == 1)]
        np.add.at(able, here[single].argmax(axis=1), steps[single])
        self._arcs(np.arange(len(able)), np.full(len(able), self._sink), able)
        pairs = touched[~outside[touched] & (size[touched] == 2)]
        ends = np.nonzero(here[pairs])[1].reshape(-1, 2)
        self._arcs(ends[:, 0], ends[:, 1], steps[pairs])
        self._arcs(ends[:, 1], ends[:, 0], steps[pairs])
        self._many(here, steps, touched[outside[touched] & (size[touched] > 1)], to_sink=True)
        self._many(here, steps, touched[~outside[touched] & (size[touched] > 2)], to_sink=False)

    def _many(self, here: Bools, steps: Steps, nets: NDArray[np.int64], *, to_sink: bool) -> None:
        """Add the arcs for nets of many pins.

        Every pin feeds the net's arc, which ends in the sink or feeds every pin.
        """
        entries = self._next + np.arange(len(nets))
        self._next += len(nets)
        net, pin = np.nonzero(here[nets])
        endless = np.full(len(pin), ENDLESS)
        self._arcs(pin, entries[net], endless)
        if to_sink:
            self._arcs(entries, np.full(len(nets), self._sink), steps[nets])
            return
        exits = self._next + np.arange(len(nets))
        self._next += len(nets)
        self._arcs(entries, exits, steps[nets])
        self._arcs(exits[net], pin, endless)

    def _order(self, windows: Windows, stage: int) -> None:
        """Let each node bring what it needs and earlier stages cannot hold, and vice versa."""
        sources, readers = self._place[windows.graph.arcs].reshape(-1, 2).T
        both = (sources >= 0) & (readers >= 0)
        sources, readers = sources[both], readers[both]
        late, early = ~windows.maybe[stage][self._free], windows.surely[stage + 1][self._free]
        needs, needed = late[sources], early[readers]
        self._arcs(readers[needs], sources[needs], np.full(int(needs.sum()), ENDLESS))
        self._arcs(sources[needed], readers[needed], np.full(int(needed.sum()), ENDLESS))

    def least(self, node: int | None = None) -> NDArray[np.int64] | None:
        """Return the nodes of a stage with one, and with all that is there for sure.

        The result is None if any takes too long.
        """
        arc = None if node is None else int(self._place[node])
        capacity = 0 if arc is None else self._flow.capacity(arc)
        if arc is not None:
            self._flow.set_arc_capacity(arc, ENDLESS)
        status = self._flow.solve(self._origin, self._sink)
        assert status == self._flow.OPTIMAL
        self.cuts += 1
        found = None
        if self._flow.optimal_flow() <= TIME_STEPS:
            cut = np.array(self._flow.get_source_side_min_cut())
            found = self._free[cut[cut < len(self._free)]]
            self.held[found] = True
        if arc is not None:
            self._flow.set_arc_capacity(arc, capacity)
        return found
