"""Bounds by prices of nodes: some device must hold its share of all prices.

For any prices, let C be the most that devices which pay for no transfer can hold within the known
bottleneck. The other devices hold the rest. Let n(k) of these be of kind k, and let shares u(k) add
up to the rest::

    sum of n(k) u(k) over kinds k = sum of all prices - C

Then some device of some kind k holds a set S with ``worth(S) >= u(k)``. The bottleneck is at least
the least load of such sets of any kind, which ``subset_sweep.py`` finds. Shares are proportional to
what devices of the kinds can hold within the bottleneck that is tried. The prices are the duals of
the set-covering program::

    minimise the number of sets, each of load <= bottleneck, that hold every node once,
    with n(k) sets of each kind k

Column generation solves it: the set that is worth most by the prices joins the program, which gives
new prices. A box keeps these near the best ones so far, or they would oscillate. The set is sought
among few labels, and among all only where none of the few is worth its share: then the prices may
prove something. Where sets for K devices suffice for a bottleneck, in the linear relaxation, a
smaller bottleneck is tried. Between bottlenecks prices are rounded to integers,
which prove at once what the program's own prices come near to.

Source: Gilmore and Gomory, "A linear programming approach to the cutting-stock problem", 1961; du
Merle, Villeneuve, Desrosiers and Hansen, "Stabilized column generation", 1999.

**Integer prices.** Where prices are integers, so is the worth of a set: of a sum of 31, with 6
devices, some device holds 6 rather than 5.17. So a sum of one more than a multiple of the devices
proves most, and prices are rounded to that. Searches with integer prices also keep few labels, as
few sets differ in worth, and their results are exact.

Source: Chvátal, "Edmonds polytopes and a hierarchy of combinatorial problems", 1973; Fekete and
Schepers, "New classes of fast lower bounds for bin packing problems", 2001, for rounded sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from math import floor, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placer.solver.bounds.work_sharing import prices_of_work
from placer.solver.cpsat.runner import PER_WORK
from placer.solver.free.set_covering import Covering, Owned
from placer.solver.free.set_graph import SetGraph, set_graph
from placer.solver.free.subset_sweep import Found, Stopped, Subsets
from placer.solver.problem import ROUNDING, SAME, Problem
from placer.solver.reduce import Reduction

MOST_SCALE = 40
"""The largest integer worth of a set of full load: larger ones take many labels."""

Whole = NDArray[np.int64]


def whole_prices(
    prices: Sequence[float], shares: Sequence[tuple[int, float]], free: Callable[[Whole], int]
) -> Iterator[tuple[Whole, list[int]]]:
    """Yield prices rounded in several ways, with each kind's least share of them.

    Args:
        prices: by node; a set of the most load is worth about one.
        shares: by kind of the devices that pay for transfers, their number, and the most that each
            holds.
        free: returns the most that the other devices hold of integer prices.
    """
    for scale in range(1, MOST_SCALE + 1):
        scaled = np.maximum(0.0, np.array(prices) * scale)
        rounded = np.floor(scaled + 0.5).astype(np.int64)
        held, surplus = _less_than_all(rounded, shares, free)
        trimmed = _trimmed(rounded, scaled, surplus)
        for whole, most in ((rounded, held), (trimmed, _less_than_all(trimmed, shares, free)[0])):
            if surplus >= 0:
                yield whole, [one + 1 for one in most]


def _less_than_all(
    whole: Whole, shares: Sequence[tuple[int, float]], free: Callable[[Whole], int]
) -> tuple[list[int], int]:
    """Return, by kind, what each device may hold so that all hold less than there is.

    And by how much it is more than one less.

    What is left over is negative where nothing needs to be held.
    """
    left = int(whole.sum()) - free(whole) - 1
    each = left / sum(count * share for count, share in shares)
    held = [max(0, whole_part(each * share)) for _, share in shares]
    left -= sum(count * most for (count, _), most in zip(shares, held, strict=True))
    for kind in sorted(range(len(shares)), key=lambda kind: held[kind] - each * shares[kind][1]):
        if shares[kind][0] <= left:
            held[kind], left = held[kind] + 1, left - shares[kind][0]
    return held, left


def _trimmed(rounded: Whole, scaled: NDArray[np.float64], surplus: int) -> Whole:
    """Return the prices with one less for the nodes that were rounded up the most."""
    order = np.argsort(scaled - rounded, kind="stable")
    trimmed = rounded.copy()
    trimmed[order[rounded[order] > 0][:surplus]] -= 1
    return trimmed


def whole_part(worth: float) -> int:
    """Return the largest integer that a worth with rounding errors may be."""
    return floor(worth + 1e-6)


class _Labels(NamedTuple):
    """Limits of the labels of a sweep at one step: more labels make sharper but slower bounds.

    Attributes:
        few: of searches for a set of worth.
        first: of the first search for a bound, which may stand for long.
        usual: of later searches for a bound, in the beginning.
        most: of later searches for a bound.
        kept: labels of all steps together, about 1 GB.
    """

    few: int = 2_000
    first: int = 40_000
    usual: int = 6_000
    most: int = 48_000
    kept: int = 30_000_000


class _Gaps(NamedTuple):
    """Relative distances from the best known bottleneck.

    Attributes:
        near: within it, everything that is known is tried to be proven.
        nearer: the same for smaller groups, after that failed.
        close: the same for single nodes; also a change of prices that is too small to go on.
    """

    near: float = 0.002
    nearer: float = 0.0005
    close: float = 1e-4


class _Prices(NamedTuple):
    """Handling of prices.

    Attributes:
        least: least price of a node in the beginning, as a part of all prices.
        damping: weight of the best prices so far in the tried ones, against oscillation.
        joining: part of its share from which a set joins the program.
    """

    least: float = 1e-5
    damping: float = 0.4
    joining: float = 0.98


LABELS, GAPS, PRICES = _Labels(), _Gaps(), _Prices()


FIRST_STRIDE = 0.04
"""First increase of the bottleneck that is tried, of its range; doubled after each proof."""

GROUPS = 8
"""Groups of nodes per device in the beginning: fewer are too coarse, more take too long."""

LITTLE, LEAST_SHARE = 0.02, 0.0201
"""Worth below which sets are alike, and the least share: more, also of much slower devices."""


MOST_WHOLE = 8
"""The most integer prices that are tried at a time."""


Over = Callable[[float], bool]
"""Counts work and returns whether the search must end."""


def share_bound(
    problem: Problem,
    nodes: Reduction,
    upper: float,
    known: float,
    over: Over,
    groups: tuple[int, float] = (GROUPS, inf),
) -> float:
    """Return a lower bound on the bottleneck of free placements in ms, at most ``upper``.

    Args:
        problem: the placement problem, of the kind that ``set_graph.applies`` names.
        nodes: its layers, joined where they must be together.
        upper: the bottleneck that is to be proven.
        known: a lower bound.
        over: ends the search.
        groups: the numbers of groups of nodes per device, in the beginning and in the end.
    """
    graph = set_graph(problem, nodes) if upper > known else None
    return _Shares(graph, upper, known, over, groups).bound() if graph is not None else known


@dataclass(frozen=True)
class _Tried:
    """Prices, and what a search by them says.

    Attributes:
        prices: by node; a set is worth about one, on average of all devices.
        count: sets of the load allowed that are needed to hold all nodes, as far as is known; no
            more than there are devices prove nothing.
        sets: those that are worth most, and for each device that pays for no transfer what it would
            hold.
    """

    prices: list[float]
    count: float
    sets: list[Owned]


@dataclass
class _Shares:
    """The column generation.

    Attributes:
        graph: the sets that devices could hold.
        upper: the bottleneck that is known.
        known: the bound so far.
        over: ends the search.
        groups: so many groups of nodes for each device in the beginning, and in the end.
        pool: all sets that were found, by kind, and their loads.
        most_worth: by kind, what a set was worth at the most by the last prices.
        few_labels: of searches among few sets; more where these miss one.
        labels: of searches among all; more where these find one that there is not.
    """

    graph: SetGraph
    upper: float
    known: float
    over: Over
    groups: tuple[int, float] = (GROUPS, inf)
    pool: dict[Owned, float] = field(default_factory=dict)
    few_labels: int = LABELS.few
    labels: int = LABELS.usual

    def __post_init__(self) -> None:
        self.counts = [kind.devices for kind in self.graph.kinds]
        self.devices = sum(self.counts)
        self.most_worth = [1.0] * len(self.counts)

    def bound(self) -> float:
        """Return the bound that is proven when the search ends or is stopped."""
        prices = self._prices_of_work()
        self.known = self._of_work(prices)
        with suppress(Stopped):
            self._go_on([price + PRICES.least * sum(prices) for price in prices])
        return self.known

    def _prices_of_work(self) -> list[float]:
        """Return prices by work alone: nodes may be cut anywhere, and all devices end together."""
        owners = [(kind.devices, kind.work_ms) for kind in self.graph.kinds]
        return prices_of_work(owners + [(1, time_ms) for time_ms in self.graph.free_ms])

    def _of_work(self, prices: Sequence[float]) -> float:
        """Return the bottleneck within which devices hold all nodes of worth, without transfers."""
        low, high, whole = self.known, self.upper, sum(prices)
        while high - low > SAME * self.upper:
            middle = (low + high) / 2
            # Fractional knapsacks: an upper limit of the worth that all devices hold within
            # `middle`.
            room = sum(
                kind.devices * self._held(prices, kind.work_ms, middle)[0]
                for kind in self.graph.kinds
            )
            room += sum(self._held(prices, time_ms, middle)[0] for time_ms in self.graph.free_ms)
            low, high = (middle, high) if room * (1 + ROUNDING) < whole else (low, middle)
        return low

    def _go_on(self, prices: list[float]) -> None:
        """Try bottlenecks between what is proven and what sets suffice for.

        Where that is all, in smaller groups.
        """
        scaled, whole, _ = self._scaled(prices, self.upper)
        self.most_worth = [
            max(LITTLE, self._held(scaled, kind.work_ms, self.upper)[0])
            for kind in self.graph.kinds
        ]
        self._weighed(
            self._subsets(self.upper), scaled, self._shares(whole), self.upper, LABELS.first
        )
        self._try_whole([price * self.devices / self._in_all(self.most_worth) for price in scaled])
        count, ceiling, tried, stride = (
            self.groups[0] * self.devices,
            self.upper,
            False,
            FIRST_STRIDE,
        )
        while not self.over(0.0) and self.known < self.upper:
            finest = count >= len(prices)
            near = self.known > ceiling * (
                1 - (GAPS.close if finest else GAPS.nearer if tried else GAPS.near)
            )
            # The groups are too coarse to close the gap: use smaller ones.
            if near and tried:
                if finest or 2 * count > self.groups[1] * self.devices:
                    return
                count, ceiling, tried = 2 * count, self.upper, False
                continue
            target = (
                ceiling if near else min((ceiling + self.known) / 2, self.known + stride * ceiling)
            )
            prices, able = self._generate(target, prices, self._groups(prices, count))
            self._try_whole(prices)
            if able:
                ceiling, tried = target, True
            else:
                stride *= 2

    def _try_whole(self, prices: Sequence[float]) -> None:
        """Round prices to integers; keep their bound if no light set of the pool has a share."""
        shares = list(zip(self.counts, self._shares(self.devices), strict=True))
        rounded = list(whole_prices(prices, shares, self._free_worth))
        searches, tries = self._subsets(self.upper), 0
        while rounded and tries < MOST_WHOLE and self.known < self.upper and not self.over(0.0):
            tries += 1
            most = [self._most_by(whole, least) for whole, least in rounded]
            best = max(range(len(rounded)), key=most.__getitem__)
            if most[best] <= self.known:
                break
            whole, least = rounded.pop(best)
            found = []
            for kind, (subsets, one) in enumerate(zip(searches, least, strict=True)):
                light = subsets.search(list(whole / one), 1 - 0.5 / one, LABELS.usual)
                found.append(self._counted(light))
                self._keep(kind, found[-1].nodes, self.upper)
            self.known = max(self.known, min(self.upper, *(one.least_ms for one in found)))

    def _most_by(self, whole: Whole, least: Sequence[int]) -> float:
        """Return a limit on the bound of integer prices: the lightest known set of enough worth."""
        loads = (
            load
            for (kind, nodes), load in self.pool.items()
            if whole[list(nodes)].sum() >= least[kind]
        )
        return min(loads, default=self.upper)

    def _free_worth(self, whole: Whole) -> int:
        """Return the most that devices without transfers hold of integer prices."""
        held = (
            self._held(whole.tolist(), time_ms, self.upper)[0] for time_ms in self.graph.free_ms
        )
        return sum(map(whole_part, held))

    def _subsets(self, most_ms: float) -> list[Subsets]:
        """Return a search for each kind."""
        return [
            Subsets(kind.steps, kind.work_ms, most_ms, lambda: self.over(0.0))
            for kind in self.graph.kinds
        ]

    def _groups(self, prices: Sequence[float], count: int) -> list[list[int]]:
        """Return runs of the sweep that cost about the same."""
        groups: list[list[int]] = []
        whole, passed = sum(max(0.0, price) for price in prices), 0.0
        for step in self.graph.kinds[0].steps:
            if not groups or passed >= len(groups) * whole / count or count >= len(prices):
                groups.append([])
            groups[-1].append(step.node)
            passed += max(0.0, prices[step.node])
        return groups

    def _generate(
        self, target: float, prices: list[float], groups: Sequence[Sequence[int]]
    ) -> tuple[list[float], bool]:
        """Improve the prices for a bottleneck.

        Return the best prices, and whether sets within the bottleneck suffice for the groups.
        """
        searches = self._subsets(target)
        fresh = best = self._tried(searches, prices, target)
        base = [max(price, PRICES.least * sum(best.prices)) for price in best.prices]
        program = Covering(groups, base, self.counts, len(self.graph.free_ms))
        program.join([*(owned for owned, load in self.pool.items() if load <= target), *fresh.sets])
        new = True
        while self.known < target and not self.over(0.0):
            solved = program.solve()
            # in all of the box some set of the pool is worth more than one
            if solved is None:
                if not program.widen():
                    break
                continue
            count, duals = solved
            leans = program.leans()
            # No new column, or no better count: widen the box if prices lean on its borders,
            # otherwise these prices are the best.
            if not new or count <= max(self.devices, best.count * (1 + GAPS.close)):
                if not leans or not program.widen():
                    break
            mixed = [
                PRICES.damping * old + (1 - PRICES.damping) * dual
                for old, dual in zip(best.prices, duals, strict=True)
            ]
            fresh = self._tried(searches, mixed, target)
            if fresh.count > best.count:
                best = fresh
                program.centre(best.prices)
            new = program.join(fresh.sets)
        return best.prices, self.known < target

    def _tried(self, searches: Sequence[Subsets], prices: Sequence[float], target: float) -> _Tried:
        """Return what prices prove, and the sets that are worth most by them."""
        scaled, whole, held = self._scaled(prices, target)
        shares, sets = self._shares(whole), list(held)
        for kind, (subsets, share) in enumerate(zip(searches, shares, strict=True)):
            enough = max(PRICES.joining * share, LITTLE)
            found = self._counted(subsets.search(scaled, enough, self.few_labels, real=True))
            self.most_worth[kind] = found.most_worth
            sets += self._keep(kind, found.nodes, target)
        shares = self._shares(whole)
        if min(shares) > LITTLE and self._in_all(self.most_worth) <= whole * (1 - ROUNDING):
            # The quick search proves nothing. Search all sets only if the prices may prove
            # something.
            every = self._weighed(searches, scaled, shares, target, self.labels)
            while self.labels < LABELS.most and any(
                one.nodes and self.graph.kinds[kind].load(one.nodes) > target for kind, one in every
            ):
                self.labels *= 2
                every = self._weighed(searches, scaled, shares, target, self.labels)
            for kind, found in every:
                kept = self._keep(kind, found.nodes, target)
                if kept:
                    self.few_labels = min(2 * self.few_labels, LABELS.usual)
                sets += kept
                self.most_worth[kind] = max(self.most_worth[kind], found.most_worth)
        worth = self._in_all(self.most_worth) / self.devices
        return _Tried([price / worth for price in scaled], whole / worth, sets)

    def _weighed(
        self,
        searches: Sequence[Subsets],
        prices: Sequence[float],
        shares: Sequence[float],
        target: float,
        most_labels: int,
    ) -> list[tuple[int, Found]]:
        """Keep what prices prove.

        The least load of all sets that are worth a share, of any kind.
        """
        found = []
        for kind, (subsets, share) in enumerate(zip(searches, shares, strict=True)):
            enough = max(share * (1 - ROUNDING), LITTLE)
            most = min(most_labels, LABELS.kept // len(prices))
            found.append((kind, self._counted(subsets.search(prices, enough, most))))
        if min(shares) > LITTLE:
            self.known = max(self.known, min(target, *(one.least_ms for _, one in found)))
        return found

    def _scaled(
        self, prices: Sequence[float], target: float
    ) -> tuple[list[float], float, list[Owned]]:
        """Return prices that make shares about one, and the rest of devices without transfers."""
        held = [self._held(prices, time_ms, target) for time_ms in self.graph.free_ms]
        rest = sum(prices) - sum(most for most, _ in held)
        unit = max(rest / self.devices, sum(map(abs, prices)) / len(prices)) or 1.0
        owned = [(len(self.counts) + place, nodes) for place, (_, nodes) in enumerate(held)]
        return [price / unit for price in prices], rest / unit, owned

    def _shares(self, whole: float) -> list[float]:
        """Return, by kind, the share of a device, as sets were worth at the most.

        Where that is little, a bit more.
        """
        slow = [most <= LEAST_SHARE for most in self.most_worth]
        if all(slow):
            return [whole / self.devices] * len(slow)
        rest = whole - LEAST_SHARE * sum(compress(self.counts, slow))
        fast = self._in_all(
            [0.0 if one else most for one, most in zip(slow, self.most_worth, strict=True)]
        )
        return [
            LEAST_SHARE if one else rest * most / fast
            for one, most in zip(slow, self.most_worth, strict=True)
        ]

    def _in_all(self, worth: Sequence[float]) -> float:
        return sum(count * most for count, most in zip(self.counts, worth, strict=True))

    def _counted(self, found: Found) -> Found:
        """Count the work of a search and return its result."""
        self.over((found.labels + PER_WORK.labels_of_a_search) / PER_WORK.labels)
        return found

    def _keep(self, kind: int, nodes: frozenset[int], target: float) -> list[Owned]:
        """Add the set to the pool and return it; None if missing or heavier than the target."""
        load = self.graph.kinds[kind].load(nodes)
        if not nodes or load > target:
            return []
        self.pool[kind, nodes] = load
        return [(kind, nodes)]

    def _held(
        self, prices: Sequence[float], time_ms: Sequence[float], target: float
    ) -> tuple[float, frozenset[int]]:
        """Return the most that a device without transfers holds: fractional worth, whole nodes."""
        worth, left = 0.0, target
        nodes: list[int] = []
        wanted = [
            node
            for node, price in enumerate(prices)
            if price > 0 and time_ms[node] <= target * (1 + ROUNDING)
        ]
        for node in sorted(wanted, key=lambda node: time_ms[node] / prices[node]):
            if time_ms[node] > left:
                return (worth + prices[node] * left / time_ms[node]) * (1 + ROUNDING), frozenset(
                    nodes
                )
            worth, left = worth + prices[node], left - time_ms[node]
            nodes.append(node)
        return worth * (1 + ROUNDING), frozenset(nodes)
