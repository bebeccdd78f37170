"""How steps are timed: after some to warm up, each alone, from idle devices to idle devices, or
many in a row.

At tiny sizes the times tell nothing, and few are taken.
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

WARM_UPS, REPEATS = (1, 2) if cases.is_small() else (2, 7)

ROW_S, SHORTEST_ROW = (0.0, 2) if cases.is_small() else (1.5, 5)
"""How long a row of steps lasts in seconds, and its fewest steps.

A loop fills the devices once and drains them once: of five steps of ResNet-101 on two H100s, a step
107.4 ms by the events of each, that made 110.3. Clocks at the power limit swing about once a
second; rows are repeated over that. """


def steps(
    step: Callable[[], Any], places: Sequence[torch.device], repeats: int = REPEATS
) -> dict[str, list[float]]:
    """Times of a step, in ms: ``step_ms`` until the devices are idle, ``host_ms`` until the call
    returned.
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
    """Time of one of many steps in a row, in ms, as in a training loop: nobody waits between them.

    Args:
        step: what is timed; it is warm.
        meet: waits until all devices are idle.
        count: of the steps.
    """
    meet()
    began = perf_counter()
    for _ in range(count):
        step()
    meet()
    return 1e3 * (perf_counter() - began) / count


def row_of(alone_ms: Sequence[float]) -> int:
    """How many steps make a row, by the times of some that were alone."""
    return max(SHORTEST_ROW, math.ceil(1e3 * ROW_S / median(alone_ms)))


def wait(places: Sequence[torch.device]) -> None:
    """Until the devices are idle."""
    for place in places:
        devices.synchronise(place)
