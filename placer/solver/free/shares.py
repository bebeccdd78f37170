"""Shares: put a price on every node, and some device must hold its share of all prices.

For any prices, let C be the most that devices which pay for no transfer can hold within the bottleneck that is known.
The other K devices hold the rest, so one of them holds a set S with::

    worth(S) >= (sum of all prices - C) / K      and the bottleneck is at least the least load(S) of such sets

``subsets.py`` finds that load, however the sets lie. The prices are the duals of the set-covering program

    minimise the number of sets, each of load <= bottleneck, that hold every node once

solved by column generation: the set that is worth most by the prices joins the program, which gives new prices. These
are kept near the best ones so far, in a box, or they would swing from end to end. The set is looked for among few, and
among all only where none of the few is worth its share: then the prices may prove something. Where sets for K devices
suffice for a bottleneck, as far as fractions of sets are sets, a smaller one is tried. Between bottlenecks prices are
rounded to whole ones (``whole_prices.py``), which prove at once what the program's own come near to.

Source: Gilmore and Gomory, "A linear programming approach to the cutting-stock problem", 1961; du Merle, Villeneuve,
Desrosiers and Hansen, "Stabilized column generation", 1999.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

from placer.solver.free.covering import Covering
from placer.solver.free.set_graph import SetGraph, set_graph
from placer.solver.free.subsets import Found, Stopped, Subsets
from placer.solver.free.whole_prices import Whole, whole_part, whole_prices
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction

SLACK = 1e-9
CLOSE = 1e-4
NEAR, NEARER = 0.002, 0.0005
"""Within so much of what is known, all of it is tried to be proven; of what cannot be, smaller groups are tried."""

GROUPS = 8
"""So many groups of nodes for each device in the beginning."""

LITTLE = 0.02
ALMOST = 0.98
FEW_LABELS = 2_000
FIRST_LABELS, LABELS, MOST_LABELS = 40_000, 6_000, 48_000
"""Labels of the first search for a bound, which may stand for long; of later ones in the beginning, and at the most."""

LABELS_KEPT = 30_000_000
"""No more labels in all are kept at a time."""

MOST_WHOLE = 8
"""So many whole prices are tried at a time."""

HALVINGS = 40
"""So often the range of a bottleneck is halved that work alone proves."""

EVEN = 1e-5
"""What all nodes cost at the least in the beginning, of the sum."""

STEP_BACK = 0.4
"""How much of the best prices so far is in those that are tried."""

LABELS_A_SEARCH = 20_000
"""What a search does besides, in labels."""

LABELS_A_WORK = 2_000_000
"""Labels looked at in a unit of work, in the measure of ``cpsat.Meter``."""

Over = Callable[[float], bool]
"""Told of work that was done, whether the search is to end."""


def share_bound(
    problem: Problem,
    nodes: Reduction,
    upper: float,
    known: float,
    over: Over,
    groups: tuple[int, float] = (GROUPS, inf),
) -> float:
    """A lower bound on the bottleneck of free placements, in milliseconds; no more than ``upper``.

    Args:
        problem: what is asked, of the kind that ``set_graph.applies`` names.
        nodes: its layers, joined where they must be together.
        upper: a bottleneck; it is looked for a proof that none is smaller.
        known: a lower bound.
        over: ends the search.
        groups: so many groups of nodes for each device in the beginning, and in the end.
    """
    graph = set_graph(problem, nodes) if upper > known else None
    return _Shares(graph, upper, known, over, groups).bound() if graph is not None else known


@dataclass(frozen=True)
class _Tried:
    """Prices, and what a search by them says.

    Attributes:
        prices: by node; a set is worth about one.
        count: sets of the load allowed that are needed to hold all nodes, as far as is known; K or less proves nothing.
        sets: those that are worth most.
        held: by device that pays for no transfer, what it would hold.
    """

    prices: list[float]
    count: float
    sets: list[frozenset[int]]
    held: list[frozenset[int]]


@dataclass
class _Shares:
    """The column generation.

    Attributes:
        graph: the sets that devices could hold.
        upper: the bottleneck that is known.
        known: the bound so far.
        over: ends the search.
        groups: so many groups of nodes for each device in the beginning, and in the end.
        pool: all sets that were found, and their loads.
        few_labels: of searches among few sets; more where these miss one.
        labels: of searches among all; more where these find one that there is not.
    """

    graph: SetGraph
    upper: float
    known: float
    over: Over
    groups: tuple[int, float] = (GROUPS, inf)
    pool: dict[frozenset[int], float] = field(default_factory=dict)
    few_labels: int = FEW_LABELS
    labels: int = LABELS

    def bound(self) -> float:
        """What is proven until the end, or until it is stopped in the midst of it."""
        self.known = max(self.known, self._of_work())
        with suppress(Stopped):
            self._go_on()
        return self.known

    def _of_work(self) -> float:
        """The bottleneck within which devices could just do all the work, were nodes cut anywhere at no cost."""
        low, high, whole = self.known, self.upper, sum(self.graph.work_ms)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            room = self.graph.devices * middle + sum(
                self._held(self.graph.work_ms, time_ms, middle)[0] for time_ms in self.graph.free_ms
            )
            low, high = (middle, high) if room * (1 + SLACK) < whole else (low, middle)
        return low

    def _go_on(self) -> None:
        """Try bottlenecks between what is proven and what sets suffice for; where that is all, in smaller groups."""
        prices = [work + EVEN * sum(self.graph.work_ms) for work in self.graph.work_ms]
        scaled, share, _ = self._scaled(prices, self.upper)
        self._weighed(self._subsets(self.upper), scaled, share, self.upper, FIRST_LABELS)
        self._try_whole([work / self.upper for work in self.graph.work_ms])
        count, ceiling, tried = self.groups[0] * self.graph.devices, self.upper, False
        while not self.over(0.0) and self.known < self.upper:
            finest = count >= len(prices)
            near = self.known > ceiling * (1 - (CLOSE if finest else NEARER if tried else NEAR))
            if near and tried:
                if finest or 2 * count > self.groups[1] * self.graph.devices:
                    return
                count, ceiling, tried = 2 * count, self.upper, False
                continue
            target = ceiling if near else (ceiling + self.known) / 2
            prices, able = self._generate(target, prices, self._groups(prices, count))
            self._try_whole(prices)
            if able:
                ceiling, tried = target, True

    def _try_whole(self, prices: Sequence[float]) -> None:
        """Round prices to whole ones, and keep what those prove by which no light set of the pool is worth a share."""
        rounded = list(whole_prices(prices, self.graph.devices, self._free_worth))
        subsets, tries = self._subsets(self.upper), 0
        while rounded and tries < MOST_WHOLE and self.known < self.upper and not self.over(0.0):
            tries += 1
            most = [self._most_by(whole, least) for whole, least in rounded]
            best = max(range(len(rounded)), key=most.__getitem__)
            if most[best] <= self.known:
                break
            whole, least = rounded.pop(best)
            found = self._counted(subsets.search(list(whole / least), 1 - 0.5 / least))
            self.known = max(self.known, min(found.least_ms, self.upper))
            if found.nodes and self._load(found.nodes) <= self.upper:
                self.pool[found.nodes] = self._load(found.nodes)

    def _most_by(self, whole: Whole, least: int) -> float:
        """No more than this is proven by whole prices: the load of the lightest set known that is worth enough."""
        loads = (load for nodes, load in self.pool.items() if whole[list(nodes)].sum() >= least)
        return min(loads, default=self.upper)

    def _free_worth(self, whole: Whole) -> int:
        """What devices that pay for no transfer hold of whole prices, at the most."""
        held = (self._held(whole.tolist(), time_ms, self.upper)[0] for time_ms in self.graph.free_ms)
        return sum(map(whole_part, held))

    def _subsets(self, most_ms: float) -> Subsets:
        return Subsets(self.graph.steps, self.graph.work_ms, most_ms, lambda: self.over(0.0))

    def _groups(self, prices: Sequence[float], count: int) -> list[list[int]]:
        """Runs of the sweep that cost about the same."""
        groups: list[list[int]] = []
        whole, passed = sum(max(0.0, price) for price in prices), 0.0
        for step in self.graph.steps:
            if not groups or passed >= len(groups) * whole / count or count >= len(prices):
                groups.append([])
            groups[-1].append(step.node)
            passed += max(0.0, prices[step.node])
        return groups

    def _generate(
        self, target: float, prices: list[float], groups: Sequence[Sequence[int]]
    ) -> tuple[list[float], bool]:
        """Better and better prices for a bottleneck: the best, and whether sets of so much load suffice by group."""
        subsets = self._subsets(target)
        fresh = best = self._tried(subsets, prices, target)
        base = [max(price, EVEN * sum(best.prices)) for price in best.prices]
        program = Covering(groups, base, len(self.graph.free_ms))
        program.join([nodes for nodes, load in self.pool.items() if load <= target], fresh.held)
        new = True
        while self.known < target and not self.over(0.0):
            solved = program.solve()
            if solved is None:  # in all of the box some set of the pool is worth more than one
                if not program.widen():
                    break
                continue
            count, duals = solved
            leans = program.leans()
            if not new or count <= max(self.graph.devices, best.count * (1 + CLOSE)):
                if not leans or not program.widen():
                    break
            mixed = [STEP_BACK * old + (1 - STEP_BACK) * dual for old, dual in zip(best.prices, duals, strict=True)]
            fresh = self._tried(subsets, mixed, target)
            if fresh.count > best.count:
                best = fresh
                program.centre(best.prices)
            new = program.join(fresh.sets, fresh.held)
        return best.prices, self.known < target

    def _tried(self, subsets: Subsets, prices: Sequence[float], target: float) -> _Tried:
        """What prices prove, and the sets that are worth most by them."""
        scaled, share, held = self._scaled(prices, target)
        found = self._counted(subsets.search(scaled, max(ALMOST * share, LITTLE), self.few_labels, real=True))
        sets, worth = [found.nodes], found.most_worth
        if share > LITTLE and worth <= share * (1 - SLACK):
            found = self._weighed(subsets, scaled, share, target, self.labels)
            while found.nodes and self._load(found.nodes) > target and self.labels < MOST_LABELS:
                self.labels *= 2
                found = self._weighed(subsets, scaled, share, target, self.labels)
            if found.nodes and self._load(found.nodes) <= target:
                self.few_labels = min(2 * self.few_labels, LABELS)
            sets.append(found.nodes)
            worth = max(worth, found.most_worth)
        able = [nodes for nodes in sets if nodes and self._load(nodes) <= target]
        self.pool.update((nodes, self._load(nodes)) for nodes in able)
        return _Tried([price / worth for price in scaled], self.graph.devices * share / worth, able, held)

    def _weighed(
        self, subsets: Subsets, prices: Sequence[float], share: float, target: float, most_labels: int
    ) -> Found:
        """Keep what prices prove: the least load of all sets that are worth a share."""
        enough = max(share * (1 - SLACK), LITTLE)
        found = self._counted(subsets.search(prices, enough, min(most_labels, LABELS_KEPT // len(self.graph.steps))))
        if share > LITTLE:
            self.known = max(self.known, min(found.least_ms, target))
        return found

    def _scaled(self, prices: Sequence[float], target: float) -> tuple[list[float], float, list[frozenset[int]]]:
        """Prices by which a device's share is about one, that share, and what is held where transfers are free."""
        held = [self._held(prices, time_ms, target) for time_ms in self.graph.free_ms]
        rest = sum(prices) - sum(most for most, _ in held)
        unit = max(rest / self.graph.devices, sum(map(abs, prices)) / len(prices)) or 1.0
        return [price / unit for price in prices], rest / self.graph.devices / unit, [nodes for _, nodes in held]

    def _counted(self, found: Found) -> Found:
        """What was found, after its work is counted."""
        self.over((found.labels + LABELS_A_SEARCH) / LABELS_A_WORK)
        return found

    def _load(self, nodes: frozenset[int]) -> float:
        cut = sum(cost for pins, cost in self.graph.nets.items() if 0 < sum(pin in nodes for pin in pins) < len(pins))
        return cut + sum(self.graph.work_ms[node] for node in nodes)

    def _held(self, prices: Sequence[float], time_ms: Sequence[float], target: float) -> tuple[float, frozenset[int]]:
        """The most that a device without transfers can hold, in parts of nodes, and the whole ones among them."""
        worth, left = 0.0, target
        nodes: list[int] = []
        wanted = [node for node, price in enumerate(prices) if price > 0 and time_ms[node] <= target * (1 + SLACK)]
        for node in sorted(wanted, key=lambda node: time_ms[node] / prices[node]):
            if time_ms[node] > left:
                return (worth + prices[node] * left / time_ms[node]) * (1 + SLACK), frozenset(nodes)
            worth, left = worth + prices[node], left - time_ms[node]
            nodes.append(node)
        return worth * (1 + SLACK), frozenset(nodes)
