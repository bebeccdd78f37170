"""How steps are timed: two to warm up, then each from idle devices to idle devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from placer import devices

WARM_UPS = 2
FEWEST = 3
REPEATS = 7 if torch.cuda.is_available() else 5
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


def wait(places: Sequence[torch.device]) -> None:
    """Until the devices are idle."""
    for place in places:
        devices.synchronise(place)
