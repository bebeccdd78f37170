"""Queues of work on a device, and marks that order them; a CPU stand-in works synchronously.

    lane.wait(mark)            later work in this lane starts after the mark was reached
    with lane: ...             work issued inside goes into this lane
    mark = lane.mark()         represents all work issued to the lane so far

A step with two devices and a courier between them:

    cuda:0           [forward]─mark
                              ╲ wait
    copy lane                  [copy]─mark
                                     ╲ wait
    cuda:1                            [forward]
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from functools import cache
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from placer.devices import tensor_moves
from placer.devices.routes import HOST, has_detour
from placer.devices.streams import stream_of_lane, stream_of_recordings
from placer.devices.tensor_moves import location

Mark = Any
"""A point in a lane: a CUDA event. On a CPU stand-in the work is already done: None, or the host
time in seconds if the mark is timed."""


class _Before(threading.local):
    """The device and stream that a thread had before it entered a lane, per thread.

    Attributes:
        entered: a stack of (device index, stream).
    """

    def __init__(self) -> None:
        self.entered: list[tuple[int, torch.cuda.Stream]] = []


class Lane:
    """A queue of work on one device: a CUDA stream, or nothing on a CPU stand-in.

    Args:
        device: where the work runs.
        caller: use the caller's current stream instead of a new one.
        recorded: whether recordings include work of this lane; no other lane has its stream then.
    """

    def __init__(self, device: torch.device, caller: bool = False, recorded: bool = False) -> None:
        self.device = device
        self._stream: Any = None
        if device.type == "cuda":
            if caller:
                self._stream = torch.cuda.current_stream(device)
            elif recorded:
                self._stream = stream_of_recordings(device)
            else:
                self._stream = stream_of_lane(device, self)
        self._before = _Before()

    def __enter__(self) -> Lane:
        # Equivalent to torch.cuda.stream at a fifth of its host time: a step enters lanes hundreds
        # of times.
        if self._stream is not None:
            self._before.entered.append(
                (torch.cuda.current_device(), torch.cuda.current_stream(self._stream.device_index))
            )
            torch.cuda.set_stream(self._stream)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stream is not None:
            device, stream = self._before.entered.pop()
            # Setting a stream also makes its device current, so the device comes last.
            torch.cuda.set_stream(stream)
            torch.cuda.set_device(device)

    def wait(self, *marks: Mark) -> None:
        """Make later work wait for these marks; on a CPU stand-in, block the caller."""
        for mark in marks:
            if not isinstance(mark, torch.cuda.Event):
                continue
            if self._stream is None:
                mark.synchronize()
            else:
                self._stream.wait_event(mark)

    def mark(self, timed: bool = False) -> Mark:
        """Return a mark after all work issued to this lane so far.

        Args:
            timed: whether the time between two marks will be read.
        """
        if self._stream is None:
            return perf_counter() if timed else None
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


@cache
def shared_lane(device: torch.device) -> Lane:
    """Return the one lane of a device for recordings of different owners.

    Libraries keep a workspace per recording stream, so recordings on one stream share it. Their
    replays must not overlap in time.
    """
    return Lane(device)


class Delivery(NamedTuple):
    """One traced copy, or a batch of copies issued together, between two marks of a lane.

    Attributes:
        source: the device that was read.
        target: the device that was written.
        began: the mark before the copy.
        ended: the mark after the copy.
        clock: the device whose lane holds both marks.
        label: the sender's description.
    """

    source: torch.device
    target: torch.device
    began: Mark
    ended: Mark
    clock: torch.device
    label: Any


class Courier:
    """A sender of tensors between devices, in parallel with computations.

    Every channel between two devices has its own lanes, so a copy that waits for its target buffer
    does not delay the copies of other channels.

    Attributes:
        trace: a list that collects a ``Delivery`` for every copy; None (default) collects nothing.
    """

    def __init__(self) -> None:
        self.trace: list[Delivery] | None = None
        # (outgoing, incoming) lanes by source, target and channel
        self._lanes: dict[tuple[torch.device, torch.device, str], tuple[Lane, Lane]] = {}
        # host buffers of detours, each with the mark after which it may be overwritten
        self._stopovers: dict[tuple[Lane, torch.Size, torch.dtype], tuple[Tensor, Mark]] = {}
        self._landings: dict[tuple[Hashable, torch.device], Tensor] = {}
        # receive buffers of copies that are added to their target
        self._summands: dict[tuple[Lane, int, torch.Size, torch.dtype], Tensor] = {}

    def landing(self, key: Hashable, like: Tensor, place: torch.device) -> Tensor:
        """Return a receive buffer for a tensor; the same buffer for the same key.

        The courier keeps the buffer alive. Otherwise the allocator, or
        ``torch.cuda.empty_cache()``, could return the memory to the device while a copy into it is
        in flight, and the copy would fail.

        Args:
            key: identifies the buffer; the caller reuses it only after all readers are done.
            like: a tensor with the shape, dtype and strides of the buffer.
            place: the device.
        """
        known = self._landings.get((key, place))
        if known is None or known.shape != like.shape or known.dtype != like.dtype:
            known = self._landings[key, place] = torch.empty_like(like, device=place)
        return known

    def send(
        self,
        source: Tensor,
        ready: Mark,
        target: Tensor,
        free: Mark | Sequence[Mark],
        channel: str,
        label: Any = None,
    ) -> Mark:
        """Copy ``source`` into ``target``.

        Args:
            source: the data.
            ready: the mark after which the data are complete.
            target: a tensor of the same shape, on any device.
            free: the mark, or marks, after which the target may be overwritten.
            channel: copies of one channel between the same two devices run in order.
            label: a description for the trace.

        Returns:
            The mark of the completed copy, valid for both devices.
        """
        return self.send_all([source], ready, [target], free, channel, label)

    @torch.no_grad()
    def send_all(
        self,
        sources: Sequence[Tensor],
        ready: Mark,
        targets: Sequence[Tensor],
        free: Mark | Sequence[Mark],
        channel: str,
        label: Any = None,
        adds: Sequence[bool] = (),
    ) -> Mark:
        """Copy several tensors from one device to another; the host waits and marks once.

        Args:
            sources: at least one tensor, all on one device.
            ready: the mark after which all of them are complete.
            targets: one tensor for each source, all on one device.
            free: the mark, or marks, after which all targets may be overwritten.
            channel: as for ``send``.
            label: as for ``send``; the trace records one delivery.
            adds: for each target, whether to add to its value instead of overwriting it; empty for
                none.

        Returns:
            The mark of the completed copies, valid for both devices.
        """
        here, there = location(sources[0]), location(targets[0])
        outgoing, incoming = self._pair(here, there, channel)
        # Both lanes wait: the copy runs in the current stream of one device, and torch orders it
        # with the current stream of the other.
        outgoing.wait(ready)
        incoming.wait(ready, *(free if isinstance(free, Sequence) else (free,)))
        timed = self.trace is not None
        began = incoming.mark(timed=True) if timed else None
        places = self._places(targets, adds, incoming) if any(adds) else targets
        if has_detour(here, there):
            for source, place in zip(sources, places, strict=True):
                self._send_through_host(source, place, outgoing, incoming)
        else:
            with outgoing, incoming:
                for source, place in zip(sources, places, strict=True):
                    tensor_moves.write(source, place, here, there)
        if any(adds):
            self._add(places, targets, incoming, there)
        ended = incoming.mark(timed=timed)
        if self.trace is not None:
            self.trace.append(Delivery(here, there, began, ended, incoming.device, label))
        return ended

    def mark(self, source: torch.device, target: torch.device, channel: str) -> Mark:
        """Return a mark after all copies of a channel so far.

        Args:
            source: the device that is read.
            target: the device that is written.
            channel: as for ``send``.
        """
        return self._pair(source, target, channel)[1].mark()

    def _places(
        self, targets: Sequence[Tensor], adds: Sequence[bool], incoming: Lane
    ) -> list[Tensor]:
        """Return where the copies go: into the targets, or into summand buffers to be added.

        The buffers are reused: the next copy is behind this addition in the same lane.
        """
        places = []
        for number, (target, is_added) in enumerate(zip(targets, adds, strict=True)):
            key = (incoming, number, target.shape, target.dtype)
            if is_added and key not in self._summands:
                with incoming:
                    self._summands[key] = torch.empty_like(target)
            places.append(self._summands[key] if is_added else target)
        return places

    def _add(
        self,
        places: Sequence[Tensor],
        targets: Sequence[Tensor],
        incoming: Lane,
        there: torch.device,
    ) -> None:
        """Add the received summands to their targets."""
        adding = incoming
        # a copy to the host runs in the source GPU's lane; adding on the host must wait for it
        if incoming.device != there:
            adding = Lane(there)
            adding.wait(incoming.mark())
        with adding:
            for place, target in zip(places, targets, strict=True):
                if place is not target:
                    tensor_moves.add(place, target)

    def _send_through_host(
        self, source: Tensor, target: Tensor, outgoing: Lane, incoming: Lane
    ) -> None:
        """Copy by way of a host buffer, which is reused once its content has left."""
        key = (incoming, source.shape, source.dtype)
        buffer, left = self._stopovers.get(key) or (_host_like(source), None)
        outgoing.wait(left)
        with outgoing:
            tensor_moves.write(source, buffer, outgoing.device, HOST)
        incoming.wait(outgoing.mark())
        with incoming:
            tensor_moves.write(buffer, target, HOST, incoming.device)
        self._stopovers[key] = (buffer, incoming.mark())

    def _pair(self, here: torch.device, there: torch.device, channel: str) -> tuple[Lane, Lane]:
        if (here, there, channel) not in self._lanes:
            incoming = Lane(there)
            outgoing = Lane(here) if here.type == "cuda" and here != there else incoming
            # a copy to the host runs in the lane of the source GPU
            if there.type == "cpu":
                incoming = outgoing
            self._lanes[here, there, channel] = (outgoing, incoming)
        return self._lanes[here, there, channel]


def _host_like(tensor: Tensor) -> Tensor:
    """Return a host tensor of the same shape; pinned if a GPU fills it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")


def start_reading(tensor: Tensor) -> tuple[Tensor, Mark]:
    """Start copying a tensor to the host, after the caller's work on its device.

    Args:
        tensor: on any device.

    Returns:
        The copy, and the mark after which it holds the values; see ``has_passed``.
    """
    landing = _host_like(tensor)
    landing.copy_(tensor.detach(), non_blocking=True)
    return landing, Lane(location(tensor), caller=True).mark()


def finish(device: torch.device) -> None:
    """Wait until this thread's stream of a device has no work left."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def has_passed(mark: Mark) -> bool:
    """Return whether a device has reached a mark, without waiting."""
    return not isinstance(mark, torch.cuda.Event) or bool(
        mark.query()  # type: ignore[no-untyped-call]
    )


def elapsed_s(first: Mark, second: Mark) -> float:
    """Return the time between two timed marks of one lane that have passed, in seconds."""
    if isinstance(first, torch.cuda.Event):
        return float(first.elapsed_time(second)) / 1e3
    return float(second - first)
