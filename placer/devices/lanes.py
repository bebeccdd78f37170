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

from placer.devices.moving import location

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
    """Copies tensors between devices beside their computations.

    Every channel between two devices has lanes of its own: a copy that waits for room holds nothing else back.
    """

    def __init__(self) -> None:
        self._lanes: dict[tuple[torch.device, torch.device, str], tuple[Lane, Lane]] = {}

    @torch.no_grad()
    def send(self, source: Tensor, ready: Mark, target: Tensor, free: Mark, channel: str) -> Mark:
        """Copy ``source`` into ``target``.

        Args:
            source: the data.
            ready: when it is there.
            target: a tensor of the same shape, on any device.
            free: when it may be overwritten.
            channel: copies of one channel between the same two devices follow one another.

        Returns:
            When the copy is done, for both sides.
        """
        here, there = location(source), location(target)
        outgoing, incoming = self._pair(here, there, channel)
        outgoing.wait(ready)
        incoming.wait(ready, free)
        with outgoing, incoming:
            target.copy_(source, non_blocking=True)
        return incoming.mark()

    def _pair(self, here: torch.device, there: torch.device, channel: str) -> tuple[Lane, Lane]:
        if (here, there, channel) not in self._lanes:
            incoming = Lane(there)
            outgoing = Lane(here) if here.type == "cuda" and here != there else incoming
            self._lanes[here, there, channel] = (outgoing, incoming)
        return self._lanes[here, there, channel]
