"""The referee's own computation of steady-state steps: the longest cycle of events.

Events wait for others of their step, and for some of the step before. A chain of events, each of
which waits for the next, that returns to its start after k steps delays each step by a k-th of its
time. The longest such mean is the time of a step. It is found by improvement. From the mean of some
chain, longest paths are followed, where each step forward costs the mean. If paths grow without
limit, they go round a longer chain, whose mean is the next. If they do not, there is no longer
chain.

Source: Lawler, "Combinatorial Optimization: Networks and Matroids", 1976, section 3.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from graphlib import TopologicalSorter
from typing import Any

Event = tuple[Any, ...]
Waits = Mapping[Event, Set[Event]]

ROUNDING = 1e-12
"""Relative increase, of all work of a step, from which a path counts as longer."""


def longest_mean(waits: Waits, carried: Waits, duration: Callable[[Event], float]) -> float:
    """Return the longest time per step of all chains that repeat.

    Args:
        waits: by event, the events of the same step that it waits for.
        carried: by event, the events of the step before that it waits for.
        duration: of an event.
    """
    search = _Search(waits, carried, duration)
    mean, longer = 0.0, search.longer_than(0.0)
    while longer is not None and longer > mean:
        mean, longer = longer, search.longer_than(longer)
    return mean


class _Search:
    def __init__(self, waits: Waits, carried: Waits, duration: Callable[[Event], float]) -> None:
        order = list(TopologicalSorter(waits).static_order())
        self._time = {event: duration(event) for event in order}
        self._before = {
            event: [
                *((one, 0) for one in waits.get(event, ())),
                *((one, 1) for one in carried.get(event, ())),
            ]
            for event in order
        }
        self._way = dict.fromkeys(order, 0.0)
        self._least = ROUNDING * sum(self._time.values())

    def longer_than(self, mean: float) -> float | None:
        """Return the mean of a chain with a larger mean, or None without such a chain."""
        predecessors: dict[Event, tuple[Event, int]] = {}
        while self._extend(mean, predecessors):
            found = self._round(predecessors)
            if found is not None:
                return found
        return None

    def _extend(self, mean: float, predecessors: dict[Event, tuple[Event, int]]) -> bool:
        """Extend the paths by a step; return whether any is longer than the known one."""
        longer = False
        for event, before in self._before.items():
            for other, steps in before:
                way = self._way[other] + self._time[other] - steps * mean
                if way > self._way[event] + self._least:
                    self._way[event], predecessors[event] = way, (other, steps)
                    longer = True
        return longer

    def _round(self, predecessors: Mapping[Event, tuple[Event, int]]) -> float | None:
        """Return the mean of a chain that a way goes round."""
        seen: dict[Event, int] = {}
        for number, start in enumerate(predecessors):
            event = start
            while event in predecessors and event not in seen:
                seen[event] = number
                event = predecessors[event][0]
            if seen.get(event) == number and event in predecessors:
                return self._mean(event, predecessors)
        return None

    def _mean(self, start: Event, predecessors: Mapping[Event, tuple[Event, int]]) -> float:
        total, steps, event = 0.0, 0, start
        while True:
            event, passed = predecessors[event]
            total, steps = total + self._time[event], steps + passed
            if event == start:
                return total / steps
