"""How steps are timed: after some to warm up, each alone, from idle devices to idle devices, or many in a row.

On stand-ins the times tell nothing, and few are taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch

from placer import devices

WARM_UPS, FEWEST, REPEATS = (2, 3, 7) if torch.cuda.is_available() else (1, 2, 2)
ENOUGH_S = 4.0
"""What takes longer is repeated less often, but ``FEWEST`` times."""


def steps(step: Callable[[], Any], places: Sequence[torch.device], repeats: int = REPEATS) -> dict[str, list[float]]:
    """Times of a step, in ms: ``step_ms`` until the devices are idle, ``host_ms`` until the call returned."""
    for _ in range(WARM_UPS):
        step()
    times: dict[str, list[float]] = {"step_ms": [], "host_ms": []}
    started = perf_counter()
    while len(times["step_ms"]) < FEWEST or (len(times["step_ms"]) < repeats and perf_counter() - started < ENOUGH_S):
        wait(places)
        began = perf_counter()
        step()
        times["host_ms"].append(1e3 * (perf_counter() - began))
        wait(places)
        times["step_ms"].append(1e3 * (perf_counter() - began))
    return times


LASTING_S, SHORTEST_ROW = (2.0, 5) if torch.cuda.is_available() else (0.0, 2)
"""How long a row of steps lasts, and how many there are at the least.

A loop fills the devices once and drains them once: of five steps of ResNet-101 on two H100s, a step 107.4 ms by the
events of each, that made 110.3. And clocks at the power limit swing about once a second.
"""


def in_a_row(
    step: Callable[[], Any], places: Sequence[torch.device], count: int | None = None
) -> dict[str, list[float]]:
    """Times of one of many steps in a row, as in a training loop: nobody waits between them.

    Args:
        step: what is timed.
        places: the devices.
        count: of the steps; if None, so many as take ``LASTING_S``.

    Returns:
        ``step_ms`` of one of them; ``alone_ms`` of a step from idle devices to idle devices, of which the host took
        ``host_ms``.
    """
    alone = steps(step, places, FEWEST)
    count = count or row_of(alone["step_ms"])

    def run() -> None:
        for _ in range(count):
            step()

    times = steps(run, places)["step_ms"]
    return {
        "step_ms": [time / count for time in times],
        "alone_ms": alone["step_ms"],
        "host_ms": alone["host_ms"],
    }


def row_of(alone_ms: Sequence[float]) -> int:
    """How many steps make a row, by the times of some that were alone."""
    return max(SHORTEST_ROW, math.ceil(1e3 * LASTING_S / median(alone_ms)))


def wait(places: Sequence[torch.device]) -> None:
    """Until the devices are idle."""
    for place in places:
        devices.synchronise(place)
