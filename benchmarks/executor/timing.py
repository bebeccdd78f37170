"""The timing of steps after a warm-up.

Steps run isolated, from idle devices to idle devices, or many of them consecutively. At tiny sizes
the times mean nothing, and few are taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from placer import devices

from . import cases


@dataclass(frozen=True)
class Repetitions:
    """How often steps are repeated.

    Attributes:
        warm_ups: steps before the first that is timed. Placer's third step records the passes, for
            up to nine seconds with four replicas.
        repeats: timed steps, or turns of an engine.
        row_s: how long consecutive steps last in seconds. Clocks at the power limit swing about
            once a second, and rows of steps last longer than that.
        shortest_row: the fewest consecutive steps. A loop fills and drains the devices once: with
            five steps of ResNet-101 on two H100s, of 107.4 ms each, it took 110.3 ms a step.
    """

    warm_ups: int
    repeats: int
    row_s: float
    shortest_row: int


TINY = Repetitions(warm_ups=1, repeats=2, row_s=0.0, shortest_row=2)
FULL = Repetitions(warm_ups=4, repeats=7, row_s=1.5, shortest_row=5)


def repetitions() -> Repetitions:
    """Return the repetitions for the present size."""
    return cases.sized(TINY, FULL)


def steps(
    step: Callable[[], Any], places: Sequence[torch.device], repeats: int | None = None
) -> dict[str, list[float]]:
    """Return the times of a step in ms.

    ``step_ms`` lasts until the devices are idle, ``host_ms`` until the call returned.

    Args:
        step: the step.
        places: the devices that it uses.
        repeats: the number of timed steps; None for the usual one.
    """
    usual = repetitions()
    for _ in range(usual.warm_ups):
        step()
    times: dict[str, list[float]] = {"step_ms": [], "host_ms": []}
    for _ in range(usual.repeats if repeats is None else repeats):
        wait(places)
        began = perf_counter()
        step()
        times["host_ms"].append(1e3 * (perf_counter() - began))
        wait(places)
        times["step_ms"].append(1e3 * (perf_counter() - began))
    return times


def row(step: Callable[[], Any], meet: Callable[[], None], count: int) -> float:
    """Return the time of one of many consecutive steps in ms, without waits as in a loop.

    Args:
        step: the step, already warm.
        meet: waits until all devices are idle.
        count: the number of steps.
    """
    meet()
    began = perf_counter()
    for _ in range(count):
        step()
    meet()
    return 1e3 * (perf_counter() - began) / count


def row_of(alone_ms: Sequence[float]) -> int:
    """Return how many steps to time together, given the times of some isolated steps."""
    usual = repetitions()
    return max(usual.shortest_row, math.ceil(1e3 * usual.row_s / median(alone_ms)))


def wait(places: Sequence[torch.device]) -> None:
    """Wait until the devices are idle."""
    for place in places:
        devices.synchronise(place)
