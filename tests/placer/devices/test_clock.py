"""One axis of time for several devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from placer.devices.timing import clock


class _Event:
    """Reached ``at_ms`` on its device's own axis."""

    def __init__(self, at_ms: float) -> None:
        self._at_ms = at_ms

    def elapsed_time(self, later: _Event) -> float:
        return later._at_ms - self._at_ms


def test_a_host_that_was_put_aside_while_it_looked_does_not_move_a_device_on_the_axis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen with ten processes on two GPUs: a transfer was told to begin 3 ms before the pass whose
    value it sends."""
    looks = iter(
        [
            *[clock._Look(_Event(10.0 + n), 3.5 + n, 7.0) for n in range(9)],
            clock._Look(_Event(20.0), 10.0, 0.02),
        ]
    )
    monkeypatch.setattr(clock, "synchronise", lambda place: None)
    monkeypatch.setattr(clock.torch.cuda, "device", lambda place: _Anywhere())
    monkeypatch.setattr(clock.Clock, "_look", lambda self: next(looks))
    place = torch.device("cuda:0")
    mark: Any = _Event(25.0)
    assert clock.Clock([place]).ms(mark, place) == 15.0


class _Anywhere:
    def __enter__(self) -> None: ...

    def __exit__(self, *failure: object) -> None: ...
