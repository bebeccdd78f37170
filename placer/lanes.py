"""Queues of work on a device, and marks in them that other queues wait for; on a CPU stand-in, work is done at once.

lane.wait(mark)            what follows in this lane starts after the mark's lane got there
with lane: ...             what is issued inside goes into this lane
mark = lane.mark()         stands for all that was issued so far
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from placer import devices

Mark = Any
"""A point in a lane; None on a CPU stand-in, where everything issued is done."""


class Lane:
    """One queue of work on one device; a CUDA stream, or nothing.

    Args:
        device: where the work runs.
        caller: whether this is the lane that the calling code already issues to, rather than a new one.
    """

    def __init__(self, device: torch.device, caller: bool = False) -> None:
        self.device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.current_stream(device) if caller else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._active: list[ExitStack] = []

    def __enter__(self) -> Lane:
        stack = ExitStack()
        if self._stream is not None:
            stack.enter_context(torch.cuda.stream(self._stream))
        self._active.append(stack)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._active.pop().close()

    def wait(self, *marks: Mark) -> None:
        """Let what follows start after these marks."""
        for mark in marks:
            if mark is not None and self._stream is not None:
                self._stream.wait_event(mark)

    def mark(self, timed: bool = False) -> Mark:
        """A mark behind all that was issued to this lane so far.

        Args:
            timed: whether the time between two marks will be asked for.
        """
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


class Courier:
    """Copies tensors between devices beside their computations: one outgoing and one incoming lane a device."""

    def __init__(self, places: list[torch.device]) -> None:
        self._out = {place: Lane(place) for place in places}
        self._in = {place: Lane(place) for place in places}

    @torch.no_grad()
    def send(self, source: Tensor, ready: Mark, target: Tensor, free: Mark) -> Mark:
        """Copy ``source`` into ``target``.

        Args:
            source: the data.
            ready: when it is there.
            target: a tensor of the same shape, on any device.
            free: when it may be overwritten.

        Returns:
            When the copy is done, for both sides.
        """
        here, there = devices.location(source), devices.location(target)
        incoming = self._lane(self._in, there)
        outgoing = self._lane(self._out, here) if here.type == "cuda" else incoming
        outgoing.wait(ready)
        incoming.wait(ready, free)
        with outgoing, incoming:
            target.copy_(source, non_blocking=True)
        return incoming.mark()

    @staticmethod
    def _lane(lanes: dict[torch.device, Lane], place: torch.device) -> Lane:
        if place not in lanes:
            lanes[place] = Lane(place)
        return lanes[place]
