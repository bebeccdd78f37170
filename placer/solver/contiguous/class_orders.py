"""Unlike devices: for each order of device classes, the best chain of ideals.

    classes   a a b b    chains of ideals within the windows of that order; transfers of a
              a b a b    stage use the links between its class and the classes of the other
              ...        ends. ✗ most orders have no chain within the known bottleneck

An order lists the classes of all stages. A placement on fewer devices leaves stages empty. As the
classes of the other ends are known, or nearly, unlike links count with their real costs. With the
best links alone, many chains look good although they cross hosts.

The place of a stage is known too, and so is its number of micro-batches in flight. So this search
also serves devices that are all alike, which have one order, where memory binds in training. Memory
counts by sums of the nodes' least bytes, or exactly for the best chains (``StageCapacity``). A
placement that leaves devices idle is a chain of the order that begins with those devices: their
stages are empty, and all stages behind them are in use.

Source: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
NeurIPS 2020, section 5, for chains of ideals.

**Exact memory.** A stage's memory is not a sum over nodes: it has a peak, and crossing values exist
only there. So sums (``memory_bounds.least_by_node``, ``most_by_node``) decide most sets, and
``StageCapacity`` the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import factorial, inf, prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from placer.solver.bounds.memory_bounds import can_bind, least_by_node, most_by_node
from placer.solver.components import sources_and_readers
from placer.solver.contiguous import ideal_frontiers
from placer.solver.contiguous.class_windows import ClassNets, Graph, Windows
from placer.solver.contiguous.ideal_frontiers import Between, Frontier, Range
from placer.solver.contiguous.transfer_windows import MOST_PINS, narrowed_windows
from placer.solver.cpsat.runner import PER_WORK
from placer.solver.cpsat.stage_windows import members, neighbourhood, work_on
from placer.solver.memory import FootprintCache
from placer.solver.problem import ROUNDING, Problem
from placer.solver.reduce import Reduction
from placer.solver.values import arcs_of

Bools = NDArray[np.bool_]
Vector = NDArray[np.float64]


class StageCapacity:
    """The memory of stages.

    Args:
        problem: the placement problem, contiguity understood.
        nodes: its layers.
    """

    def __init__(self, problem: Problem, nodes: Reduction) -> None:
        self._problem, self._nodes = problem, nodes
        self._cache = FootprintCache(problem, nodes.nodes)
        self._least: dict[tuple[int, int], Vector] = {}
        self._most: dict[int, Vector] = {}

    @property
    def sets(self) -> int:
        """The number of sets whose memory was computed."""
        return self._cache.computed

    def least(self, device: int, flight: int) -> Vector:
        """Return, by node, the least bytes that a stage uses for it."""
        flight = 1 if self._problem.recompute[device] != "never" else flight
        if (device, flight) not in self._least:
            self._least[device, flight] = least_by_node(self._problem, self._nodes, device, flight)
        return self._least[device, flight]

    def most(self, flight: int) -> Vector:
        """Return, by node, the most bytes that a stage uses for it."""
        if flight not in self._most:
            self._most[flight] = most_by_node(self._problem, self._nodes, flight)
        return self._most[flight]

    def more_ms(self, device: int, flight: int, members: Bools) -> float:
        """Return a stage's extra time because of memory: 0, its forward passes, or infinite."""
        problem = self._problem
        one = self._cache.footprint(np.flatnonzero(members).tolist())
        rule, limit = problem.recompute[device], problem.devices[device].usable_bytes
        if rule != "always" and one.total_bytes(flight) <= limit:
            return 0.0
        if rule == "never" or one.total_bytes(flight, again=True) > limit:
            return inf
        if rule == "always":
            return 0.0
        layers = (layer for node in np.flatnonzero(members) for layer in self._nodes.nodes[node])
        return sum(problem.forward_ms[layer][device] for layer in layers)


Table = NDArray[np.float64]
Order = tuple[int, ...]
Memory = Literal["sums", "exact"]

MOST_ORDERS = 100
"""The most orders of classes: with more, the integer program is faster."""


MOST_PAIRS = 30_000_000
"""The most pairs of ideals of an order, about a second."""


NEVER = 4.0
"""Time of a transfer without a link, as a multiple of the bottleneck: more than any stage has."""


def applies(problem: Problem, nodes: Reduction) -> bool:
    """Return whether orders are few and matter: unlike links, or memory that depends on place."""
    return (
        problem.contiguous
        and problem.request.objective == "throughput"
        and not problem.untaxed
        and (problem.one_link is None or (problem.training and can_bind(problem)))
        and _number_of_orders(problem) <= MOST_ORDERS
        and sum(1 + len(value.readers) for value in problem.values) <= MOST_PINS
    )


def _number_of_orders(problem: Problem) -> float:
    """Return the most orders of classes that there are."""
    sizes = [len(members) for members in problem.alike_devices()]
    # some are left out: no closed form, so counted as if they were in it
    if sum(sizes) > problem.most_devices:
        return float(len(sizes) ** problem.most_devices)
    # Permutations of a multiset: n! / (n_a! n_b! ...).
    return factorial(sum(sizes)) / prod(map(factorial, sizes))


def orders(problem: Problem) -> list[Order]:
    """Return the orders of classes for as many stages as there may be."""
    sizes = [len(members) for members in problem.alike_devices()]
    found: list[Order] = [()]
    for _ in range(problem.most_devices):
        found = [
            (*order, kind)
            for order in found
            for kind in range(len(sizes))
            if order.count(kind) < sizes[kind]
        ]
    return found


class Stopped(Exception):
    """The time is over."""


@dataclass(frozen=True)
class Chain:
    """What is known of an order.

    Attributes:
        bound: no placement in this order has a smaller bottleneck, in milliseconds; infinite if
            none is within the limit.
        devices: by layer, its device, for the best chain; None without a chain.
        work: the work that it took, in the measure of ``cpsat.runner.Meter``.
    """

    bound: float
    devices: list[int] | None
    work: float


class ClassOrders:
    """The graph of a problem for all orders of its classes.

    Args:
        problem: the placement problem, of the kind that ``applies`` names.
        nodes: its layers, joined where they must be together.
        upper: only chains with a bottleneck of no more than this count, in milliseconds.
    """

    def __init__(self, problem: Problem, nodes: Reduction, upper: float) -> None:
        self.problem, self.nodes, self.upper = problem, nodes, upper
        self.classes = problem.alike_devices()
        arcs = sorted(nodes.arcs(arcs_of(problem.values)))
        works = np.array([work_on(problem, nodes, alike[0]) for alike in self.classes])
        nets = ClassNets(problem, nodes, NEVER * upper)
        windows = narrowed_windows(problem, nodes, upper)
        self.graph = Graph(
            works, np.array(arcs, np.int64).reshape(-1, 2), _before(problem, nodes), nets, windows
        )
        self.capacity = StageCapacity(problem, nodes) if can_bind(problem) else None

    def best(self, order: Order, over: Callable[[], bool], memory: Memory = "sums") -> Chain | None:
        """Return the best chain of an order; None if there are too many ideals, or time is over.

        A placement on fewer devices leaves the first stages of some order empty. So a stage has as
        many micro-batches in flight as the number of stages behind it requires.

        Args:
            order: by stage, its class.
            over: asked stage by stage; ends the search.
            memory: how memory counts: by sums of the nodes' least bytes, or exactly.
        """
        windows = Windows(self.graph, order, self.upper)
        windows.narrow()
        work = windows.cuts / PER_WORK.cuts
        if not windows.possible:
            return Chain(inf, None, work)
        chains, known = _Chains(self, windows, memory, over), self._sets
        try:
            value = chains.value()
        except Stopped:
            return None
        work += chains.pairs / PER_WORK.order_pairs + (self._sets - known) / PER_WORK.footprints
        if value is None:
            return None
        if value == inf:
            return Chain(inf, None, work)
        return Chain(value * (1 - ROUNDING), chains.read(), work)

    @property
    def _sets(self) -> int:
        return 0 if self.capacity is None else self.capacity.sets


def _before(problem: Problem, nodes: Reduction) -> Bools:
    """Return, by node, whether each is itself or one that it depends on."""
    before, _ = neighbourhood(problem, nodes)
    table = np.zeros((len(before), len(before)), np.bool_)
    for node, bits in enumerate(before):
        table[node, members(bits)] = True
    return table


class _StageGraph(ideal_frontiers.Graph):
    """The graph of ``ideal_frontiers.py`` for one order, with the nets' costs for one stage.

    Args:
        given: the graph of all orders.
        windows: of the order.
        stage: whose costs; nets cost nothing if left out.
    """

    def __init__(self, given: ClassOrders, windows: Windows, stage: int | None = None) -> None:
        pins = given.graph.nets.pins
        arcs = [(source, reader) for source, reader in given.graph.arcs.tolist()]
        self.count = pins.shape[1]
        self.needs, _ = sources_and_readers(self.count, arcs)
        self.first, self.last = ideal_frontiers.along(arcs, windows.stages_of())
        self.cost_ms = np.zeros(len(pins)) if stage is None else windows.least_ms(stage)
        self.pins = pins.T.astype(np.float32)
        self.size = self.pins.sum(axis=0)


class _Chains:
    """The tables of the dynamic program for one order, frontier by frontier."""

    def __init__(
        self, given: ClassOrders, windows: Windows, memory: Memory, over: Callable[[], bool]
    ) -> None:
        self.given, self.windows, self.order, self.memory = given, windows, windows.order, memory
        self.over = over
        self.within = given.upper * (1 + ROUNDING)
        self.pairs = 0
        self.banned = given.graph.works == inf
        self.works = np.where(self.banned, 0.0, given.graph.works)
        self.graph = _StageGraph(given, windows)

    def value(self) -> float | None:
        """Return the smallest bottleneck, infinite if none is within.

        The result is None if there are too many ideals.
        """
        nothing = np.zeros(self.works.shape[1], np.bool_)
        self.frontiers = [Frontier(self.graph, nothing, np.arange(0), np.zeros((1, 0), np.bool_))]
        self.reached = [np.zeros(1)]
        for stage, kind in enumerate(self.order):
            before = self.frontiers[-1]
            behind = (
                None
                if self.over()
                else ideal_frontiers.next_frontier(before, stage + 1, self._ranges(stage))
            )
            if behind is None:
                return None
            behind = behind.some(np.argsort(behind.sums(self.works[kind]), kind="stable"))
            value = self._through(stage, before, behind)
            if value is None:
                return None
            # Ideals that no chain reaches within the bottleneck cannot be part of a better
            # placement.
            alive = value <= self.within
            if not alive.any():
                return inf
            self.frontiers.append(behind.some(alive))
            self.reached.append(value[alive])
        whole = self.frontiers[-1].whole
        return inf if whole is None else float(self.reached[-1][whole])

    def _ranges(self, stage: int) -> list[Range]:
        """Return the work of what the first stages hold.

        No more than the stage can add, nor less than the next can take.
        """
        work = self.works[self.order[stage]]
        done = self.frontiers[-1].sums(work)
        found = [Range(work, float(done.min()), float(done.max()) + self.within)]
        if stage + 1 < len(self.order):
            work = self.works[self.order[stage + 1]]
            held = float(work[self.windows.surely[stage + 2]].sum())
            found.append(Range(work, held - self.within, float(work.sum())))
        return found

    def _through(self, stage: int, before: Frontier, behind: Frontier) -> Vector | None:
        """Return, by ideal, the best of the chains that end there.

        The result is None if the pairs are too many.
        """
        work = self.works[self.order[stage]]
        rows = np.argsort(before.sums(work), kind="stable")
        before, reached = before.some(rows), self.reached[-1][rows]
        begins, ends = before.sums(work), behind.sums(work)
        slack = ROUNDING * float(work.sum())
        blocks, pairs = ideal_frontiers.blocks(begins, ends, self.within, slack)
        self.pairs += pairs
        if self.pairs > MOST_PAIRS:
            return None
        value = np.full(len(behind), inf)
        loads = _Loads(self, stage, before, behind)
        for one, other in blocks:
            table = loads.chains(one, other, reached[one], np.minimum(value[other], self.within))
            value[other] = np.minimum(value[other], table.min(axis=0))
        return value

    def read(self) -> list[int]:
        """Return, by layer, its device, following the best choices from the last ideal."""
        # The table stores values only. One column of each frontier is computed again to find the
        # choice.
        left = [list(alike) for alike in self.given.classes]
        devices = [0] * self.works.shape[1]
        place = self.frontiers[-1].whole
        for stage in reversed(range(len(self.order))):
            assert place is not None
            before, behind = self.frontiers[stage], self.frontiers[stage + 1]
            loads = _Loads(self, stage, before, behind.some(slice(place, place + 1)))
            table = loads.chains(
                slice(None), slice(None), self.reached[stage], np.array([self.within])
            )
            held, place = behind.ideal(place), int(table.argmin())
            device = left[self.order[stage]].pop()
            for node in np.flatnonzero(held & ~before.ideal(place)):
                devices[node] = device
        return self.given.nodes.spread(devices)


class _Loads:
    """What a stage takes that holds what is between two ideals."""

    def __init__(self, chains: _Chains, stage: int, before: Frontier, behind: Frontier) -> None:
        given, kind = chains.given, chains.order[stage]
        graph = _StageGraph(given, chains.windows, stage)
        self._before, self._behind = (
            Frontier(graph, one.must, one.free, one.taken) for one in (before, behind)
        )
        self._between = Between(self._before, self._behind)
        work, banned = chains.works[kind], chains.banned[kind]
        self._work = before.sums(work), behind.sums(work)
        self._capacity, self._device = given.capacity, given.classes[kind][0]
        # A banned node weighs 1, so a stage with any of them exceeds 0.5: bans are one more limit.
        limits = [(banned.astype(np.float64), 0.5)] if banned.any() else []
        self._flight, self._over = 1, chains.over
        self._exactly = self._capacity is not None and chains.memory != "sums"
        if self._capacity is not None:
            stages = len(chains.order)
            self._flight = given.problem.flight(stages - stage)
            limit = given.problem.devices[self._device].usable_bytes * (1 + ROUNDING)
            limits.append((self._capacity.least(self._device, self._flight), limit))
            if self._exactly:
                most = self._capacity.most(self._flight)
                self._sure = before.sums(most), behind.sums(most), limit
        self._limited = [
            (before.sums(weight), behind.sums(weight), most) for weight, most in limits
        ]

    def chains(self, rows: slice, columns: slice, reached: Vector, most: Vector) -> Table:
        """Return, by earlier and later ideal, the bottleneck of the best chain through both.

        Args:
            rows: some earlier ideals.
            columns: some later ones.
            reached: by earlier ideal, the bottleneck of the best chain to it.
            most: by later ideal, the bottleneck from which it does not matter.
        """
        load = self._of(rows, columns)
        table: Table = np.maximum(load, reached[:, None])
        if self._exactly:
            self._settle(load, table, rows, columns, most)
        return table

    def _settle(self, load: Table, table: Table, rows: slice, columns: slice, most: Vector) -> None:
        """Let the best of each later ideal be such that its device has the memory for it."""
        decided, places = self._roomy(rows, columns), np.arange(table.shape[1])
        # Exact memory is expensive, so it is computed lazily: only the current best row of a column
        # is made exact, until the best row of each column is exact.
        while True:
            chosen = table.argmin(axis=0)
            undecided = np.flatnonzero((table[chosen, places] <= most) & ~decided[chosen, places])
            if not len(undecided):
                return
            for column in undecided:
                row = chosen[column]
                decided[row, column] = True
                more_ms = self._more_ms(
                    int(row) + (rows.start or 0), int(column) + (columns.start or 0)
                )
                table[row, column] = max(table[row, column], load[row, column] + more_ms)

    def _roomy(self, rows: slice, columns: slice) -> Bools:
        """Return, by earlier and later ideal, whether the device surely has enough memory."""
        begins, ends, most = self._sure
        return np.asarray(ends[None, columns] - begins[rows, None] <= most)

    def _more_ms(self, row: int, column: int) -> float:
        assert self._capacity is not None
        if self._over():
            raise Stopped
        members = self._behind.ideal(column) & ~self._before.ideal(row)
        return self._capacity.more_ms(self._device, self._flight, members)

    def _of(self, rows: slice, columns: slice) -> Table:
        """Return, by some ideals and some later ones, the load, or infinity."""
        begins, ends = self._work
        load: Table = self._between.transfers(rows, columns)
        load += ends[None, columns]
        load -= begins[rows, None]
        for begins, ends, most in self._limited:
            load[ends[None, columns] - begins[rows, None] > most] = inf
        return load
