"""One time axis for the events of several devices."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any, NamedTuple

import torch

from placer.devices.lanes import Mark
from placer.devices.names import synchronise

# Attempts to relate a device's time to the host's, about 20 us each.
_LOOKS = 10


class _Look(NamedTuple):
    """An event, the host time in ms at which it was reached, and the uncertainty in ms.

    The host reads its clock before recording the event and after waiting for it:

        host    before ──────── record ─ reached ──────── after
                                at_ms = middle, doubt_ms = after - before
    """

    event: Any
    at_ms: float
    doubt_ms: float


class Clock:
    """A clock in milliseconds since its creation, valid for marks of all its devices.

    CUDA can only compare events of the same device. So the clock records one reference event on
    each device and relates it to the host's clock. Creating the clock waits until the devices are
    idle.

    Args:
        places: the devices.
    """

    def __init__(self, places: Iterable[torch.device]) -> None:
        places = list(places)
        for place in places:
            synchronise(place)
        self._zero = perf_counter()
        self._references: dict[torch.device, tuple[Any, float]] = {}
        for place in places:
            if place.type == "cuda":
                self._references[place] = self._reference(place)

    def ms(self, mark: Mark, place: torch.device) -> float:
        """Return the time of a mark in milliseconds since the clock was made.

        Args:
            mark: a timed mark from a lane, already reached.
            place: the lane's device.
        """
        if isinstance(mark, float):
            return 1e3 * (mark - self._zero)
        reference, at_ms = self._references[place]
        return at_ms + float(reference.elapsed_time(mark))

    def _reference(self, place: torch.device) -> tuple[Any, float]:
        """Return an event and its time, from the attempt with the least uncertainty.

        The operating system may suspend the host between its two clock reads, and other work may
        delay the device.
        """
        with torch.cuda.device(place):
            return min((self._look() for _ in range(_LOOKS)), key=lambda look: look.doubt_ms)[:2]

    def _look(self) -> _Look:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        before = perf_counter()
        event.record()
        event.synchronize()
        after = perf_counter()
        return _Look(event, 1e3 * ((before + after) / 2 - self._zero), 1e3 * (after - before))
