"""The timing of steps after a warm-up.

Steps run isolated, from idle devices to idle devices, or many of them consecutively. At tiny sizes
the times mean nothing, and few are taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch

from placer import devices

from . import cases

WARM_UPS, REPEATS = (1, 2) if cases.is_small() else (4, 7)
"""Placer's third step records the passes, for up to nine seconds with four replicas."""

ROW_S, SHORTEST_ROW = (0.0, 2) if cases.is_small() else (1.5, 5)
"""How long a row of steps lasts in seconds, and its fewest steps.

A loop fills the devices once and drains them once: of five steps of ResNet-101 on two H100s, a step
107.4 ms by the events of each, that made 110.3. Clocks at the power limit swing about once a
second; rows are repeated over that. """


def steps(
    step: Callable[[], Any], places: Sequence[torch.device], repeats: int = REPEATS
) -> dict[str, list[float]]:
    """Return the times of a step in ms.

    ``step_ms`` lasts until the devices are idle, ``host_ms`` until the call returned.
    """
    for _ in range(WARM_UPS):
        step()
    times: dict[str, list[float]] = {"step_ms": [], "host_ms": []}
    for _ in range(repeats):
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
    return max(SHORTEST_ROW, math.ceil(1e3 * ROW_S / median(alone_ms)))


def wait(places: Sequence[torch.device]) -> None:
    """Wait until the devices are idle."""
    for place in places:
        devices.synchronise(place)
