"""One axis of time for marks in the lanes of several devices."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any, NamedTuple

import torch

from placer.devices.lanes import Mark
from placer.devices.names import synchronise

# At a device's time, some 20 us each.
_LOOKS = 10


class _Look(NamedTuple):
    """An event, when the host takes it to have been reached, and between its looks at the time
    before and after.
    """

    event: Any
    at_ms: float
    doubt_ms: float


class Clock:
    """Tells when marks were reached, in milliseconds from when the clock was made; it waits for
    idle devices first.

    Events of two devices cannot be compared: each device has one of its own, whose time the host
    sees when it comes.

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
        """When a mark was reached.

        Args:
            mark: from a lane, asked for with its time; the device has reached it.
            place: the lane's device.
        """
        if isinstance(mark, float):
            return 1e3 * (mark - self._zero)
        reference, at_ms = self._references[place]
        return at_ms + float(reference.elapsed_time(mark))

    def _reference(self, place: torch.device) -> tuple[Any, float]:
        """An event and when it was reached: of several the one about which the host is the least in
        doubt.

        Between its two looks at the time the host may have been put aside, or the device may have
        worked for others.
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
