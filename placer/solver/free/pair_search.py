"""Local search for free placements with large steps: two devices redivide all their nodes.

The busiest device redivides with another one, so that both take less than it took, until it cannot
with any. Then a few random pairs redivide within a little more than the best known, and the search
goes on from there. Far from the best, it returns to the best. ``pair_sweep.py`` finds the
divisions.

Source: Lourenço, Martin and Stützle, "Iterated local search", 2003.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from random import Random
from typing import NamedTuple

import numpy as np

from placer.schema.base import PROVEN_GAP
from placer.solver.cpsat.runner import PER_WORK
from placer.solver.free.loads import loads_add_up
from placer.solver.free.pair_sweep import Pairs, TooWide
from placer.solver.free.set_graph import MOST_NODES
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction


class _Kick(NamedTuple):
    """Random divisions that leave a local optimum.

    Attributes:
        worse: by round in turn, the allowed increase over the best known, relative.
        pairs: numbers of pairs that are redivided before the busiest device follows.
        noise: random distance from the best division, as a multiple of the allowed increase.
        labels: labels of a sweep at one step: fewer, as the division need not be the best.
    """

    worse: tuple[float, ...] = (0.02, 0.02, 0.05, 0.02, 0.02, 0.2)
    pairs: tuple[int, ...] = (1, 1, 2, 3)
    noise: float = 2.0
    labels: int = 500


KICK = _Kick()

STEP_LABELS = 2_000
"""Labels of a sweep at one step, where the busiest device must take less."""


MOST_DIVISIONS = 3
"""The most divisions of a pair that are tried until one fits the memory, each better informed."""

PATIENCE = (20, 150)
"""Rounds without improvement that end the search, of few nodes and of many."""


Over = Callable[[float], bool]
"""Counts work and returns whether the search must end."""


def applies(problem: Problem, nodes: Reduction) -> bool:
    """Return whether loads, memory and numbers judge a division."""
    several = len(problem.devices) > 1
    return loads_add_up(problem) and several and len(nodes.nodes) <= MOST_NODES


class PairSearch:
    """The search, which can be continued and remembers failed divisions.

    Args:
        problem: the placement problem, of the kind that ``applies`` names.
        nodes: its layers, joined where they must be together.

    Attributes:
        idle: consecutive rounds without improvement.
    """

    def __init__(self, problem: Problem, nodes: Reduction) -> None:
        self._pairs, self._nodes = Pairs(problem, nodes), nodes
        self._random = Random(problem.request.seed)
        self._patience = min(PATIENCE[0] + 2 * len(nodes.nodes), PATIENCE[1])
        self._in_vain: set[tuple[int, int, frozenset[int], frozenset[int]]] = set()
        self._worse, self.idle = cycle(KICK.worse), 0
        self._is_judged = self._is_too_wide = False
        self._best: list[int] | None = None

    def improved(self, start: Sequence[int], over: Over, enough: float = 0.0) -> list[int] | None:
        """Return the best assignment found from a start, or from where the search stopped.

        Args:
            start: by layer, its device; it meets all requirements.
            over: counts work; ends the search.
            enough: a bottleneck that ends the search, as no smaller one exists.

        Returns:
            By layer, its device; None if every two devices hold too much to redivide.
        """
        self._over, self._ended = over, False
        given = [start[layers[0]] for layers in self._nodes.nodes]
        if not self._pairs.capacity.holds(given):  # without recomputing
            return list(start)
        if self._best is None or self._most_ms(given) < self._most_ms(self._best):
            self._best = self._now = self._down(given)
            self.idle = 0
        best = self._nodes.spread(self._from_here(self._best, enough))
        return best if self._is_judged or not self._is_too_wide else None

    def _from_here(self, best: list[int], enough: float) -> list[int]:
        """Return, by node, its device in the best placement that is found."""
        best_ms = self._most_ms(best)
        while self.idle < self._patience and best_ms > enough and not self._ended:
            worse = next(self._worse)
            self._now = self._down(self._kicked(self._now, best_ms, worse))
            now_ms, self.idle = self._most_ms(self._now), self.idle + 1
            if now_ms < best_ms * (1 - 1e-12):
                best, best_ms, self.idle = self._now, now_ms, 0
            elif now_ms > best_ms * (1 + worse):
                self._now = best
        self._best = best
        return best

    def _most_ms(self, devices: Sequence[int]) -> float:
        return max(self._pairs.loads.by_device(devices))

    def _down(self, devices: list[int]) -> list[int]:
        """Divide what the busiest device holds with another one, until that makes none better."""
        while not self._ended:
            found = self._less_busy(devices)
            if found is None:
                break
            devices = found
        return devices

    def _less_busy(self, devices: list[int]) -> list[int] | None:
        """Return a placement whose busiest device is less busy, with no other in its place."""
        loads = self._pairs.loads.by_device(devices)
        busiest = max(range(len(loads)), key=lambda device: loads[device])
        others = [device for device in range(len(loads)) if device != busiest]
        self._random.shuffle(others)
        # Devices with little to do take from the busiest most readily, if layers are limited.
        if not self._pairs.problem.any_numbers:
            others.sort(key=lambda device: loads[device])
        most_ms = loads[busiest] * (1 - PROVEN_GAP)
        if most_ms >= loads[busiest]:  # of zero there is nothing less
            return None
        for other in others:
            key = (busiest, other, _held(devices, busiest), _held(devices, other))
            if key in self._in_vain or self._ended:
                continue
            found = self._divided(devices, busiest, other, (most_ms, most_ms), STEP_LABELS, 0.0)
            if found is not None and max(self._pairs.loads.by_device(found)) <= loads[busiest]:
                return found
            self._in_vain.add(key)
        return None

    def _kicked(self, devices: list[int], best_ms: float, worse: float) -> list[int]:
        """Return a placement in which some pairs hold something else."""
        for _ in range(self._random.choice(KICK.pairs)):
            loads = self._pairs.loads.by_device(devices)
            one, other = self._random.sample(range(len(loads)), 2)
            most_ms = best_ms * (1 + worse * self._random.random())
            within = (max(most_ms, loads[one]), max(most_ms, loads[other]))
            noise_ms = KICK.noise * worse * best_ms
            found = (
                None
                if self._ended
                else self._divided(devices, one, other, within, KICK.labels, noise_ms)
            )
            devices = devices if found is None else found
        return devices

    def _divided(
        self,
        devices: list[int],
        one: int,
        other: int,
        most_ms: tuple[float, float],
        labels: int,
        noise_ms: float,
    ) -> list[int] | None:
        """Return two devices' nodes divided as evenly as possible, or at random by noisy times."""
        for _ in range(MOST_DIVISIONS):
            found = self._division(devices, one, other, most_ms, labels, noise_ms)
            if found is None or self._pairs.capacity.holds(found):
                return found
        self._pairs.capacity.holds(devices)  # what is known of it counts again
        return None

    def _division(
        self,
        devices: list[int],
        one: int,
        other: int,
        most_ms: tuple[float, float],
        labels: int,
        noise_ms: float,
    ) -> list[int] | None:
        """Return the same, if sizes that add up were all that counts."""
        try:
            divisions = self._pairs.divisions(devices, one, other, most_ms, labels)
            self._is_judged |= divisions is not None
        except TooWide:
            divisions, self._is_too_wide = None, True
        looked_at = 0 if divisions is None else divisions.labels
        self._ended = self._over((looked_at + PER_WORK.labels_of_a_search) / PER_WORK.labels)
        if divisions is None:
            return None
        if noise_ms:
            weight = self._random.random()
            goal = weight * divisions.one_ms + (1 - weight) * divisions.other_ms
            goal = goal + noise_ms * np.array([self._random.random() for _ in goal])
        else:
            goal = divisions.most_ms
        found = [one if device == other else device for device in devices]
        for node in divisions.theirs(int(goal.argmin())):
            found[node] = other
        return found


def _held(devices: Sequence[int], which: int) -> frozenset[int]:
    return frozenset(node for node, device in enumerate(devices) if device == which)
