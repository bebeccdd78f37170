"""Orders of the nodes with few nets open at a time, so that all sets of nodes can be enumerated.

A sweep takes the nodes one by one, each into a set or out of it. Earlier decisions matter later
only through the nets with pins on both sides of the border: do they have a pin inside, outside, or
both? These are the states::

    nodes taken ──▶ │ border │ ──▶ nodes to come     a net is cut, and paid for, when it first
                     nets a: inside, b: both         has both
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property

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
