"""Dynamic programming over ideals, where they are few: exact for any graph.

The first stages of a contiguous placement hold an ideal. So a placement is a chain of ideals, and a
stage is the difference of two neighbours::

    {} < {0, 1} < {0, 1, 2, 4} < all
     stage  a         b         c

    best(devices, J) = min over ideals I within J and a class c of devices of
                       max(best(devices less one of c, I), load_c(J less I))

Only chains within a bottleneck count, so few ideals are left in each frontier
(``ideal_frontiers.py``): those that the stages so far can hold, and whose rest the other devices
can hold. A value that several stages read counts once for the stage of its source, so the
bottleneck of a chain is a lower bound where the value is sent to each of them.

Source: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
NeurIPS 2020, section 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, log2, prod

import numpy as np

from placer.solver.bounds import memory_bounds
from placer.solver.chain.optimal_cuts import Counts, Cut, kinds_left, one_less
from placer.solver.contiguous.ideal_frontiers import (
    MOST_IDEALS,
    Between,
    Bools,
    Frontier,
    Graph,
    Range,
    Table,
    Vector,
    blocks,
    next_frontier,
)
from placer.solver.contiguous.transfer_windows import narrowed_windows
from placer.solver.contiguous.unordered_nodes import (
    UnorderedLoads,
    UnorderedNodes,
    unordered_nodes,
)
from placer.solver.cpsat.runner import PER_WORK, Meter
from placer.solver.cpsat.stage_windows import most_within, work_on
from placer.solver.problem import ROUNDING, Problem
from placer.solver.reduce import Reduction

MOST_STATES = 64
"""The most numbers of devices by class in a table: its size multiplies all work."""

MOST_PAIRS = 3_500_000
"""The most pairs of ideals of neighbouring frontiers, about a second."""


def applies(problem: Problem) -> bool:
    """Return whether a stage's load follows from what it holds, or is at least so much."""
    return (
        problem.contiguous
        and problem.request.objective == "throughput"
        and problem.request.transfers == "added"
        and problem.one_link is not None
        and problem.least_devices == 1
        and problem.most_layers is None
        and prod(len(members) + 1 for members in problem.alike_devices()) <= MOST_STATES
    )


def best_chain(
    problem: Problem,
    nodes: Reduction,
    upper: float = inf,
    meter: Meter | None = None,
    over: Callable[[], bool] = lambda: False,
    left_out: Sequence[int] = (),
) -> Cut | None:
    """Return the best chain of ideals, or None if there are too many ideals.

    Args:
        problem: the placement problem, of the kind that ``applies`` names.
        nodes: its layers, joined where they must be together.
        upper: only chains with a bottleneck of at most this count, in milliseconds.
        meter: counts the work.
        over: asked stage by stage; ends the search as if there were too many ideals.
        left_out: unordered nodes that ideals leave out, see ``unordered_nodes.py``. The placement
            puts them on any device.

    Returns:
        The placement of the best chain, and a bound that holds for all placements. The bound counts
        only the state in memory, and a value that several stages read once. There is no placement
        and an infinite bound if no chain counts.
    """
    if not all(nodes.allowed):
        return Cut(None, inf)
    if not left_out and too_many_unordered(problem, nodes):
        return None
    chains = _Chains(problem, nodes, upper, left_out)
    found = chains.best(over)
    if meter is not None:
        meter.done += chains.pairs / PER_WORK.pairs
    return found


def too_many_unordered(problem: Problem, nodes: Reduction) -> bool:
    """Return whether there are too many ideals because of unordered nodes alone."""
    # Every subset of unordered nodes is an ideal: k such nodes alone give 2^k.
    return len(unordered_nodes(problem, nodes)) > log2(MOST_IDEALS)


@dataclass(frozen=True)
class _Class:
    """Devices that may be swapped.

    Attributes:
        members: the devices.
        taxed: whether they pay for transfers.
        work: by node, its time there; infinite if it may not be there.
        room: what a device holds of state, in bytes.
        most: the work that a device does within the bottleneck at the most, by each node's fastest
            class.
        slope: and by how much less for each millisecond of transfers, at the least.
        most_bytes: the state that it holds at the most, with what takes no longer.
    """

    members: list[int]
    taxed: bool
    work: Vector
    room: float
    most: float
    slope: float
    most_bytes: float


def _classes(
    problem: Problem, works: Table, state: Vector, upper: float
) -> tuple[list[_Class], Vector]:
    """Return the classes of devices, and by node, its work on its fastest."""
    groups = problem.alike_devices()
    fastest: Vector = works.min(axis=0)
    found = []
    for alike, work in zip(groups, works, strict=True):
        taxed = alike[0] not in problem.untaxed
        most, slope = most_within(fastest, work, upper)
        room = problem.devices[alike[0]].usable_bytes * (1 + ROUNDING)
        held = min(room, most_within(state, work, upper)[0])
        found.append(_Class(alike, taxed, work, room, most, slope if taxed else 0.0, held))
    return found, fastest


class _Chains:
    """The tables of the dynamic program, frontier by frontier."""

    def __init__(
        self, problem: Problem, nodes: Reduction, upper: float, left_out: Sequence[int]
    ) -> None:
        self.problem, self.nodes, self.upper = problem, nodes, upper
        self.left_out = left_out
        self.within = upper * (1 + ROUNDING)
        self.limited = memory_bounds.can_bind(problem)
        self.state_bytes = np.array(memory_bounds.state_of_nodes(problem, nodes), np.float64)
        works = np.array([work_on(problem, nodes, one[0]) for one in problem.alike_devices()])
        self.unordered: UnorderedNodes | None = None
        if left_out:
            state = self.state_bytes * self.limited
            self.unordered = UnorderedNodes(problem, nodes, left_out, works, state)
            kept = ~np.isin(np.arange(len(nodes.nodes)), left_out)
            works = np.where(kept, works, 0.0)
            self.state_bytes = np.where(kept, self.state_bytes, 0.0)
        self.classes, self.fastest = _classes(problem, works, self.state_bytes, upper)
        ranges = [range(len(one.members) + 1) for one in self.classes]
        self.states: list[list[Counts]] = [[] for _ in range(problem.most_devices + 1)]
        for counts in itertools.product(*ranges):
            if sum(counts) <= problem.most_devices:
                self.states[sum(counts)].append(counts)

    @cached_property
    def graph(self) -> Graph:
        """The nodes, with what is known of their stages."""
        windows = narrowed_windows(self.problem, self.nodes, self.upper)
        return Graph(self.problem, self.nodes, windows, self.left_out)

    def best(self, over: Callable[[], bool]) -> Cut | None:
        """Return the smallest bottleneck, and a placement that has it, or about it.

        The result is None if there are too many ideals.
        """
        nothing = np.zeros(self.graph.count, np.bool_)
        self.frontiers = [Frontier(self.graph, nothing, np.arange(0), np.zeros((1, 0), np.bool_))]
        self.reached: dict[Counts, Vector] = {self.states[0][0]: np.zeros(1)}
        self.pairs = 0
        value, chosen = inf, self.states[0][0]
        for stage in range(1, self.problem.most_devices + 1):
            if over() or not self._go_on(stage):
                return None
            if not len(self.frontiers[stage]):
                break
            whole = self.frontiers[stage].whole
            for counts in self.states[stage] if whole is not None else ():
                if self.reached[counts][whole] < value:
                    value, chosen = float(self.reached[counts][whole]), counts
        if value == inf:
            return Cut(None, inf)
        return Cut(self._read(chosen), value * (1 - ROUNDING), value)

    def _go_on(self, stage: int) -> bool:
        """Add the next frontier and its bottlenecks; return whether it has few enough ideals."""
        states = self.states[stage]
        every = next_frontier(self.frontiers[-1], stage, self._ranges(stage))
        if every is None:
            return False
        # Sorted by work, so that `blocks` finds possible successors by binary search.
        every = every.some(np.argsort(every.sums(self.fastest), kind="stable"))
        able = [self._can_be(counts, every) for counts in states]
        some = np.any(able, axis=0)
        behind = every.some(some)
        values = {counts: np.full(len(behind), inf) for counts in states}
        if not self._all_through(self.frontiers[-1], behind, values):
            return False
        for counts, fits in zip(states, able, strict=True):
            values[counts][~fits[some] | (values[counts] > self.within)] = inf
        self._keep(behind, values)
        return True

    def _keep(self, behind: Frontier, values: dict[Counts, Vector]) -> None:
        """Keep the ideals that are reached, and the stages before them."""
        alive = np.any([value < inf for value in values.values()], axis=0)
        self.frontiers.append(behind.some(alive))
        self.reached.update({counts: value[alive] for counts, value in values.items()})

    def _all_through(
        self, before: Frontier, behind: Frontier, values: dict[Counts, Vector]
    ) -> bool:
        """Take all chains into account, ideals of about the same work together.

        Whether the pairs are not too many.
        """
        begins, ends = before.sums(self.fastest), behind.sums(self.fastest)
        found, pairs = blocks(begins, ends, max(self._work_each), self._slack)
        if self.pairs + pairs > MOST_PAIRS:
            return False
        self.pairs += pairs
        between, added = Between(before, behind), self._added(before, behind)
        for rows, columns in found:
            self._through(rows, columns, between, added, values)
        return True

    def _added(self, before: Frontier, behind: Frontier) -> UnorderedLoads | None:
        """Return what unordered nodes add to stages between two frontiers; None without any."""
        if self.unordered is None:
            return None
        return UnorderedLoads(self.unordered, before, behind)

    def _through(
        self,
        rows: slice,
        columns: slice,
        between: Between,
        added: UnorderedLoads | None,
        values: dict[Counts, Vector],
    ) -> None:
        """Take into account the chains from some ideals of a frontier to some of the next."""
        loads = self._loads(rows, columns, between, added)
        for counts, value in values.items():
            for kind in kinds_left(counts):
                known = self.reached[one_less(counts, kind)][rows]
                if (known < inf).any():
                    through = np.maximum(loads[kind], known[:, None]).min(axis=0)
                    value[columns] = np.minimum(value[columns], through)

    def _loads(
        self, rows: slice, columns: slice, between: Between, added: UnorderedLoads | None
    ) -> list[Table]:
        """Return, by class, earlier and later ideal, the load of a device with the difference.

        It is infinite where no device of the class can.
        """
        moved = between.transfers(rows, columns)
        unable = between.weight(rows, columns, self.state_bytes) if self.limited else None
        found = []
        for kind, one in enumerate(self.classes):
            banned = one.work == inf
            load = moved.copy() if one.taxed else np.where(moved < inf, 0.0, inf)
            load += between.weight(rows, columns, np.where(banned, 0.0, one.work))
            if added is not None and one.taxed:
                left_bytes = 0.0 if unable is None else one.room - unable
                load += added.load(rows, columns, kind, left_bytes)
            if unable is not None:
                load[unable > one.room] = inf
            if banned.any():
                load[between.weight(rows, columns, banned.astype(np.float64)) > 0.5] = inf
            found.append(load)
        return found

    def _can_be(self, counts: Counts, every: Frontier) -> Bools:
        """Return, by ideal, whether devices of these classes can hold it and the others the rest.

        Every net that is cut keeps a device busy on either side.
        """
        # Each ms of transfers costs a device at least `slope` ms of work, on both sides of a cut.
        here = min((self.classes[kind].slope for kind in kinds_left(counts)), default=0.0)
        there = min((self.classes[kind].slope for kind in self._left(counts)), default=0.0)
        works, each = every.sums(self.fastest), self._work_each
        fits: Bools = works + here * every.cut_ms <= self._most(counts, each) + self._slack
        fits &= (
            works - there * every.cut_ms >= self._least(counts, self.fastest, each) - self._slack
        )
        if self.limited:
            state, each = every.sums(self.state_bytes), self._bytes_each
            fits &= state <= self._most(counts, each) * (1 + ROUNDING)
            fits &= state >= self._least(counts, self.state_bytes, each) - ROUNDING * float(
                self.state_bytes.sum()
            )
        return fits

    @cached_property
    def _work_each(self) -> list[float]:
        return [one.most for one in self.classes]

    @cached_property
    def _bytes_each(self) -> list[float]:
        return [one.most_bytes for one in self.classes]

    @cached_property
    def _slack(self) -> float:
        return ROUNDING * float(self.fastest.sum())

    def _ranges(self, stage: int) -> list[Range]:
        """Return the work and the state of what the first stages hold."""
        found = []
        for weights, each in (
            (self.fastest, self._work_each),
            (self.state_bytes, self._bytes_each),
        ):
            before, states = self.frontiers[-1].sums(weights), self.states[stage]
            least = min(self._least(counts, weights, each) for counts in states)
            most = max(self._most(counts, each) for counts in states)
            found.append(
                Range(weights, max(least, before.min()), min(most, before.max() + max(each)))
            )
        return found

    def _most(self, counts: Counts, each: Sequence[float]) -> float:
        """Return the most that so many devices of each class hold, from what one does."""
        return sum(number * one for number, one in zip(counts, each, strict=True))

    def _least(self, counts: Counts, weights: Vector, each: Sequence[float]) -> float:
        """Return the least that they must hold, as the others hold no more."""
        # At most most_devices - sum(counts) further devices may be used: the largest ones bound
        # what they can hold.
        left = sorted((each[kind] for kind in self._left(counts)), reverse=True)
        return float(weights.sum()) - sum(left[: self.problem.most_devices - sum(counts)])

    def _left(self, counts: Counts) -> list[int]:
        """Return, by device that is left, its class; none if no more may be used."""
        if sum(counts) == self.problem.most_devices:
            return []
        lefts = (
            len(one.members) - number for number, one in zip(counts, self.classes, strict=True)
        )
        return [kind for kind, number in enumerate(lefts) for _ in range(number)]

    def _read(self, counts: Counts) -> list[int]:
        """Return, by layer, its device, following the best choices from the last ideal."""
        left = [list(one.members) for one in self.classes]
        devices = [0] * self.graph.count
        stage = sum(counts)
        place = self.frontiers[stage].whole
        while stage:
            assert place is not None
            before, behind = self.frontiers[stage - 1], self.frontiers[stage]
            end = behind.some(slice(place, place + 1))
            last, added = Between(before, end), self._added(before, end)
            loads = self._loads(slice(None), slice(None), last, added)
            options = [
                (np.maximum(loads[kind][:, 0], self.reached[one_less(counts, kind)]), kind)
                for kind in kinds_left(counts)
            ]
            row, kind = min(options, key=lambda option: float(option[0].min()))
            held, place = behind.ideal(place), int(row.argmin())
            device = left[kind].pop()
            for node in np.flatnonzero(held & ~before.ideal(place)):
                devices[node] = device
            stage, counts = stage - 1, one_less(counts, kind)
        return self.nodes.spread(devices)
