"""The sets of nodes that a device could hold, gone through by a sweep: which is worth most, and which is lightest.

    load(S)  = sum of work(n) over n in S + sum of cost(e) over nets e with a pin in S and a pin outside
    worth(S) = sum of price(n) over n in S

Of two sets in the same state the one that is lighter and worth more will do: of these pairs, ``labels``, all are kept
that can still lead to a set of enough worth within the load allowed. How much worth the rest of the nodes can add is
told by Lagrange's multipliers: worth less a rate times the load has a plain dynamic program. Where labels are too many,
neighbours become one, with the lesser load and the greater worth: what is found then bounds the true answer.
Loads are whole numbers rounded down, worths rounded up, so nothing is lost.

Source: Irnich and Desaulniers, "Shortest path problems with resource constraints", 2005; sets instead of paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from placer.solver.sweeps import Step

LOAD_STEPS = 2**31
WORTH_STEPS = 2**30
MOST_LABELS = 6_000
RATES = (1.0, 0.6, 1.5)
"""Multipliers are the best one, and so many times of it."""

ROUNDS = 10
GOLDEN = (5**0.5 - 1) / 2

Numbers = NDArray[np.int64]
Row = NDArray[np.float64]


@dataclass(frozen=True)
class Found:
    """What a search through all sets says of those that are worth enough and are light enough.

    Attributes:
        least_ms: none is lighter; the most load that was allowed, if there is none at all.
        most_worth: none is worth more; the least worth that was asked for, if there is none at all.
        nodes: the one that is worth most, if labels were not made one on the way to it; else near that.
        labels: how many were looked at.
    """

    least_ms: float
    most_worth: float
    nodes: frozenset[int]
    labels: int = 0


class Subsets:
    """All sets of nodes.

    Args:
        steps: the sweep.
        work_ms: by node.
        most_ms: no set of more load is looked for.
    """

    def __init__(self, steps: Sequence[Step], work_ms: Sequence[float], most_ms: float) -> None:
        self._steps, self._most_ms = steps, most_ms
        self._costs: list[Numbers] = []
        for step in steps:
            cost = step.cut_ms.copy()
            cost[:, 0] += work_ms[step.node]
            scaled = np.minimum(np.floor(cost * (LOAD_STEPS / most_ms * (1 - 1e-12))), LOAD_STEPS + 1)
            self._costs.append(scaled.astype(np.int64))

    def search(
        self, prices: Sequence[float], enough: float, most_labels: int = MOST_LABELS, real: bool = False
    ) -> Found:
        """Look for sets whose prices come to ``enough``.

        Args:
            prices: by node; about 1 or less in all for a set of the most load, as they are rounded to 2**-30.
            enough: the least worth.
            most_labels: where there are more at a step, neighbours become one.
            real: or all of them but the one that is worth most are left out, so that a set is what it seems to be, and
                what is said of all sets holds for those alone that were looked at.
        """
        worth = [ceil(prices[step.node] * WORTH_STEPS) for step in self._steps]
        least = ceil(enough * WORTH_STEPS) - 1
        rests = self._rests(worth)
        if min(rate * LOAD_STEPS + rest[0][0] for rate, rest in rests) <= least:
            return Found(self._most_ms, enough, frozenset())
        found = self._labelled(worth, least, rests, most_labels, real)
        return found or Found(self._most_ms, enough, frozenset())

    def _rests(self, worth: Sequence[int]) -> list[tuple[float, list[Row]]]:
        """Some rates, and for each by step and state the most that the rest can add in worth less rate times load."""

        def bound(rate: float) -> float:
            return float(self._rest(worth, rate)[0][0]) + rate * LOAD_STEPS

        low, high = 0.0, 4.0 * WORTH_STEPS / LOAD_STEPS
        one, other = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        at_one, at_other = bound(one), bound(other)
        for _ in range(ROUNDS):
            if at_one < at_other:
                high, other, at_other = other, one, at_one
                one = high - GOLDEN * (high - low)
                at_one = bound(one)
            else:
                low, one, at_one = one, other, at_other
                other = low + GOLDEN * (high - low)
                at_other = bound(other)
        best = (low + high) / 2
        return [(rate * best, self._rest(worth, rate * best)) for rate in RATES]

    def _rest(self, worth: Sequence[int], rate: float) -> list[Row]:
        rest = [np.ones(1)]  # more than what floats round off on the way
        for step, cost, gain in zip(reversed(self._steps), reversed(self._costs), reversed(worth), strict=True):
            ways = rest[-1][step.after] - rate * cost
            ways[:, 0] += gain
            rest.append(ways.max(axis=1))
        return rest[::-1]

    def _labelled(
        self, worth: Sequence[int], least: int, rests: list[tuple[float, list[Row]]], most_labels: int, real: bool
    ) -> Found | None:
        state, load, value = np.zeros((3, 1), np.int64)
        came: list[Numbers] = []
        total = 0
        for index, (step, cost, gain) in enumerate(zip(self._steps, self._costs, worth, strict=True)):
            origin = np.arange(2 * len(state)) // 2
            column = np.tile([0, 1], len(state))
            load = load[origin] + cost[state[origin], column]
            value = value[origin] + gain * (1 - column)
            state = step.after[state[origin], column]
            able = load <= LOAD_STEPS
            for rate, rest in rests:
                able &= value + rest[index + 1][state] + rate * (LOAD_STEPS - load) > least
            chosen = _undominated(state, load, value, np.flatnonzero(able))
            state, load, value, way = state[chosen], load[chosen], value[chosen], chosen
            if len(chosen) > most_labels:
                first, last = _neighbours(state, load, step.states, most_labels)
                state, load, value, way = state[last], load[last if real else first], value[last], chosen[last]
            if not len(state):
                return None
            came.append(way)
            total += len(state)
        worthy = np.flatnonzero(value > least)
        if not len(worthy):
            return None
        least_ms = float(load[worthy].min()) / LOAD_STEPS * self._most_ms
        best = int(value.argmax())
        return Found(least_ms, float(value[best]) / WORTH_STEPS, self._traced(came, best), total)

    def _traced(self, came: Sequence[Numbers], label: int) -> frozenset[int]:
        """The nodes of a label: even ways lead from inside."""
        nodes = []
        for step, way in zip(reversed(self._steps), reversed(came), strict=True):
            origin, outside = divmod(int(way[label]), 2)
            if not outside:
                nodes.append(step.node)
            label = origin
        return frozenset(nodes)


def _undominated(state: Numbers, load: Numbers, value: Numbers, able: Numbers) -> Numbers:
    """Of the able labels those with no lighter one of their state that is worth as much, by state and load."""
    if not len(able):
        return able
    able = able[np.lexsort((-value[able], load[able], state[able]))]
    worth = value[able]
    ranked = worth + state[able] * (int(worth.max() - worth.min()) + 1)  # all of a state above all of the one before
    most = np.maximum.accumulate(ranked)
    kept = np.ones(len(able), bool)
    kept[1:] = ranked[1:] > most[:-1]
    found: Numbers = able[kept]
    return found


def _neighbours(state: Numbers, load: Numbers, states: int, most: int) -> tuple[Numbers, Numbers]:
    """The first and the last label of each run whose loads are about the same, by state."""
    width = max(1, LOAD_STEPS * states // most)
    run = state * (LOAD_STEPS // width + 2) + load // width
    first = np.flatnonzero(np.append(True, run[1:] != run[:-1]))
    return first, np.append(first[1:], len(run)) - 1
