"""A sweep over the sets of nodes that a device could hold: the most worthy and the lightest.

    load(S)  = sum of work(n) over n in S
               + sum of cost(e) over nets e with a pin in S and a pin outside
    worth(S) = sum of price(n) over n in S

A label is the load and worth of a set in a state of the sweep. Of two sets in the same state, the
one that is lighter and worth more suffices. All labels are kept that can still lead to a set of
enough worth within the allowed load. Lagrange multipliers bound the worth that the rest of the
nodes can add: worth less a rate times the load has a plain dynamic program. Where labels are too
many, neighbours become one, with the lesser load and the greater worth: the result then bounds the
true answer. Loads are integers rounded down, worths rounded up, so nothing is lost.

Source: Irnich and Desaulniers, "Shortest path problems with resource constraints", 2005, here for
sets instead of paths.

**Order of the nodes.** A sweep takes the nodes one by one, each into a set or out of it. Earlier
decisions matter later only through the nets with pins on both sides of the border: do they have a
pin inside, outside, or both? These are the states::

    nodes taken ──▶ │ border │ ──▶ nodes to come     a net is cut, and paid for, when it first
                     nets a: inside, b: both         has both
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property
from math import ceil

import numpy as np
from numpy.typing import NDArray


class Side(IntFlag):
    """Where a net has pins: in the set, or out of it."""

    INSIDE = 1
    OUTSIDE = 2


STARTS = 12
"""First nodes of greedy orders; more hardly find a better one."""
WIDE = 40
"""Pins above which a net does not make its nodes neighbours: all would be."""

MOST_STATES = 3_000
"""The most states of a border, as labels are kept for each."""
MOST_STATES_IN_ALL = 60_000
"""The most states of all borders."""

Pins = tuple[int, ...]
Border = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Step:
    """One node, by the state before it.

    Attributes:
        node: the node.
        states: how many states there are after it.
        after: by state before, the state after, with the node inside and with it outside.
        cut_ms: what nets cost that are then cut for the first time.
    """

    node: int
    states: int
    after: NDArray[np.int64]
    cut_ms: NDArray[np.float64]


def sweep(count: int, nets: dict[Pins, float]) -> list[Step] | None:
    """Return the steps of an order in which few nets are open; None if there are too many states.

    Args:
        count: of nodes.
        nets: by its pins, two or more, what it costs to cut.
    """
    return _Sweep(count, list(nets), list(nets.values())).steps()


def order_of(count: int, nets: dict[Pins, float]) -> list[int]:
    """Return the nodes in an order in which few nets are open.

    Args:
        count: of nodes.
        nets: by its pins, two or more, what it costs to cut.
    """
    return _Sweep(count, list(nets), list(nets.values())).order()


class _Sweep:
    def __init__(self, count: int, nets: list[Pins], cost_ms: list[float]) -> None:
        self.count, self.nets, self.cost_ms = count, nets, cost_ms
        self.of: list[list[int]] = [[] for _ in range(count)]
        for net, pins in enumerate(nets):
            for node in pins:
                self.of[node].append(net)

    def steps(self) -> list[Step] | None:
        """Return all steps; None if there are too many states."""
        order = self.order()
        place = {node: index for index, node in enumerate(order)}
        last = [max(place[node] for node in pins) for pins in self.nets]
        borders: list[Border] = [()]
        found, total = [], 0
        for index, node in enumerate(order):
            known: dict[Border, int] = {}
            after, cut_ms = np.zeros((len(borders), 2), np.int64), np.zeros((len(borders), 2))
            for state, border in enumerate(borders):
                for column, side in enumerate((Side.INSIDE, Side.OUTSIDE)):
                    beyond, cut_ms[state, column] = self._crossed(border, node, side, index, last)
                    after[state, column] = known.setdefault(beyond, len(known))
            borders, total = list(known), total + len(known)
            if len(borders) > MOST_STATES or total > MOST_STATES_IN_ALL:
                return None
            found.append(Step(node, len(borders), after, cut_ms))
        return found

    def _crossed(
        self, border: Border, node: int, side: int, index: int, last: Sequence[int]
    ) -> tuple[Border, float]:
        """Return the border behind a node that is on one side, and what is cut."""
        sides, cost_ms = dict(border), 0.0
        for net in self.of[node]:
            before = sides.get(net, 0)
            sides[net] = before | side
            if before and before | side != before:
                cost_ms += self.cost_ms[net]
            if last[net] == index:
                del sides[net]
        return tuple(sorted(sides.items())), cost_ms

    def order(self) -> list[int]:
        """Return the order with the fewest open nets, of greedy orders from several first nodes."""
        starts = range(0, self.count, max(1, self.count // STARTS))
        return min((self._from(start) for start in starts), key=lambda found: found[0])[1]

    def _from(self, start: int) -> tuple[tuple[int, int], list[int]]:
        """Return the most nets that are open at a time and their sum, and the order."""
        left = [len(pins) for pins in self.nets]
        near, waiting = {start}, dict.fromkeys(range(self.count))
        order: list[int] = []
        most = total = width = 0
        while waiting:
            node = min(
                near or [next(iter(waiting))], key=lambda one: (*self._opened(one, left), one)
            )
            width += self._opened(node, left)[0]
            most, total = max(most, width), total + width
            order.append(node)
            waiting.pop(node)
            for net in self.of[node]:
                left[net] -= 1
                if len(self.nets[net]) <= WIDE:
                    near.update(self.nets[net])
            near = {one for one in near if one in waiting}
        return (most, total), order

    def _opened(self, node: int, left: Sequence[int]) -> tuple[int, int]:
        """Return how many more nets a node opens than it closes, and minus those it continues."""
        fresh = [left[net] == self._sizes[net] for net in self.of[node]]
        closed = sum(
            left[net] == 1 for net, new in zip(self.of[node], fresh, strict=True) if not new
        )
        return sum(fresh) - closed, sum(fresh) - len(fresh)

    @cached_property
    def _sizes(self) -> list[int]:
        return [len(pins) for pins in self.nets]


STEPS = 2**30
"""Integer steps of the largest load and of a worth of one: nine digits; sums stay below 2**63."""
FIRST_RATES = np.geomspace(0.05, 8.0, 24)
"""Multipliers of the first search, for any slope."""
NEAR_RATES = (0.55, 0.75, 0.87, 0.95, 1.0, 1.05, 1.15, 1.33, 1.8)
"""Multipliers of later searches, relative to the best ones of the last."""

KEPT_RATES = 4
"""The best multipliers that are kept for the next search."""

Numbers = NDArray[np.int64]
Row = NDArray[np.float64]


@dataclass(frozen=True)
class Found:
    """The sets of enough worth and small enough load, as a search over all sets found them.

    Attributes:
        least_ms: no such set is lighter; the largest allowed load without any.
        most_worth: no such set is worth more; the least required worth without any.
        nodes: the set of the most worth; near it if labels were joined on the way to it.
        labels: the number of labels of the sweep.
    """

    least_ms: float
    most_worth: float
    nodes: frozenset[int]
    labels: int = 0


class Stopped(Exception):
    """A search was ended in the midst of it."""


class Subsets:
    """All sets of nodes.

    Args:
        steps: the sweep.
        work_ms: by node.
        most_ms: the largest load of a set.
        over: ends a search.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        work_ms: Sequence[float],
        most_ms: float,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._steps, self._most_ms, self._rates, self._over = steps, most_ms, FIRST_RATES, over
        self._costs: list[Numbers] = []
        for step in steps:
            cost = step.cut_ms.copy()
            cost[:, 0] += work_ms[step.node]
            scaled = np.minimum(np.floor(cost * (STEPS / most_ms * (1 - 1e-12))), STEPS + 1)
            self._costs.append(scaled.astype(np.int64))

    def search(
        self,
        prices: Sequence[float],
        enough: float,
        most_labels: int,
        real: bool = False,
    ) -> Found:
        """Look for sets whose prices come to ``enough``.

        Args:
            prices: by node; their sum is about 1 or less for a set of full load. They are rounded
                to 2**-30.
            enough: the least worth.
            most_labels: the most labels at a step; above it, neighbours become one.
            real: drop all neighbours but the most worthy instead, so that sets are real. The result
                then holds only for the sets that were searched.

        Raises:
            Stopped: the search is over.
        """
        worth = [ceil(prices[step.node] * STEPS) for step in self._steps]
        rests = self._rests(worth)
        least = ceil(enough * STEPS) - 1
        found = None
        if (rests[1][0][:, 0] + rests[0] * STEPS).min() > least:
            found = self._labelled(worth, least, rests, most_labels, real)
        return found or Found(self._most_ms, enough, frozenset())

    def _rests(self, worth: Sequence[int]) -> tuple[Row, list[Row]]:
        """Return good rates, and by step, rate and state the most worth less rate * load left."""
        # A dynamic program from the last step to the first, for several Lagrange multipliers at
        # once: worth - rate * load has no load dimension, so it is cheap.
        rates = self._rates[:, None, None]
        # more than what floats round off on the way
        rest = [np.ones((len(self._rates), 1))]
        for step, cost, gain in zip(
            reversed(self._steps), reversed(self._costs), reversed(worth), strict=True
        ):
            self._stop_if_over()
            options = rest[-1][:, step.after] - rates * cost
            options[:, :, 0] += gain
            rest.append(options.max(axis=2))
        bounds = rest[-1][:, 0] + self._rates * STEPS
        order = np.argsort(bounds, kind="stable")[:KEPT_RATES]
        # The next search has similar prices, so its best rates are near these.
        kept = self._rates[order]
        self._rates = kept[0] * np.array(NEAR_RATES)
        return kept, [one[order] for one in reversed(rest)]

    def _labelled(
        self,
        worth: Sequence[int],
        least: int,
        rests: tuple[Row, list[Row]],
        most_labels: int,
        real: bool,
    ) -> Found | None:
        rates, rest = rests[0][:, None], rests[1]
        state, load, value = np.zeros((3, 1), np.int64)
        origins: list[NDArray[np.int32]] = []
        total, width = 0, STEPS // most_labels
        for index, (step, cost, gain) in enumerate(
            zip(self._steps, self._costs, worth, strict=True)
        ):
            self._stop_if_over()
            labels = np.arange(len(state))
            origin, column = np.concatenate([labels, labels]), np.repeat([0, 1], len(state))
            load = load[origin] + cost[state[origin], column]
            value = value[origin] + gain * (1 - column)
            state = step.after[state[origin], column]
            most = (rest[index + 1][:, state] + rates * (STEPS - load)).min(axis=0)
            # Keep a label only if the best completion can reach the required worth.
            able = (load <= STEPS) & (value + most > least)
            chosen = _undominated(state, load, value, np.flatnonzero(able))
            state, load, value = state[chosen], load[chosen], value[chosen]
            way = 2 * origin[chosen] + column[chosen]
            if len(chosen) > most_labels:
                first, last, width = _neighbours(state, load, most_labels, max(1, width // 2))
                state, load, value, way = (
                    state[last],
                    load[last if real else first],
                    value[last],
                    way[last],
                )
            if not len(state):
                return None
            origins.append(way.astype(np.int32))
            total += len(state)
        worthy = np.flatnonzero(value > least)
        if not len(worthy):
            return None
        least_ms = float(load[worthy].min()) / STEPS * self._most_ms
        best = int(value.argmax())
        return Found(least_ms, float(value[best]) / STEPS, self._traced(origins, best), total)

    def _stop_if_over(self) -> None:
        if self._over():
            raise Stopped

    def _traced(self, origins: Sequence[NDArray[np.int32]], label: int) -> frozenset[int]:
        """Return the nodes of a label: even ways lead from inside."""
        nodes = []
        for step, way in zip(reversed(self._steps), reversed(origins), strict=True):
            origin, outside = divmod(int(way[label]), 2)
            if not outside:
                nodes.append(step.node)
            label = origin
        return frozenset(nodes)


def _undominated(state: Numbers, load: Numbers, value: Numbers, able: Numbers) -> Numbers:
    """Return the able labels that none of the same state dominates, by state and load."""
    if not len(able):
        return able
    place = state[able] * (STEPS + 1) + load[able]
    # quick on runs, which labels are, inside and outside
    order = np.argsort(place, kind="stable")
    able, place = able[order], place[order]
    worth = value[able]
    # all of a state above all of the one before
    # One running maximum over all states: offsets make every worth of a state larger than all
    # worths of the states before it.
    ranked = worth + state[able] * (int(worth.max() - worth.min()) + 1)
    most = np.maximum.accumulate(ranked)
    kept = np.ones(len(able), bool)
    kept[1:] = ranked[1:] > most[:-1]
    able, place = able[kept], place[kept]
    # of as heavy ones the last is worth most
    found: Numbers = able[np.append(place[1:] != place[:-1], True)]
    return found


def _neighbours(
    state: Numbers, load: Numbers, most: int, width: int
) -> tuple[Numbers, Numbers, int]:
    """Return the first and last label of each run of similar loads, by state, and the runs' width.

    Runs are as short as the number of labels allows. The first width is likely too small, as most
    labels can be of few states.
    """
    while True:
        run = state * (STEPS // width + 2) + load // width
        first = np.flatnonzero(np.append(True, run[1:] != run[:-1]))
        if len(first) <= most or width > STEPS:
            return first, np.append(first[1:], len(run)) - 1, width
        width *= 2
