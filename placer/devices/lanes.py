"""Queues of work on a device, and marks in them that other queues wait for; on a CPU stand-in, work
is done at once.

lane.wait(mark)            what follows in this lane starts after the mark's lane got there
with lane: ...             what is issued inside goes into this lane
mark = lane.mark()         stands for all that was issued so far
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
from placer.devices.streams import stream_of_lane
from placer.devices.tensor_moves import location

Mark = Any
"""A point in a lane; on a CPU stand-in, where what was issued is done: None, or the time in s if
that is asked for."""


class _Before(threading.local):
    """Where a thread was when it entered a lane, as threads may share one.

    Attributes:
        entered: its device and stream then, the last one last.
    """

    def __init__(self) -> None:
        self.entered: list[tuple[int, torch.cuda.Stream]] = []


class Lane:
    """One queue of work on one device; a CUDA stream, or nothing.

    Args:
        device: where the work runs.
        caller: whether this is the lane that the calling code already issues to, rather than a new
            one.
    """

    def __init__(self, device: torch.device, caller: bool = False) -> None:
        self.device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = (
                torch.cuda.current_stream(device) if caller else stream_of_lane(device, self)
            )
        self._before = _Before()

    def __enter__(self) -> Lane:
        # As torch.cuda.stream does it, at a fifth of the host's time: a step enters lanes hundreds
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
            torch.cuda.set_stream(stream)
            torch.cuda.set_device(device)

    def wait(self, *marks: Mark) -> None:
        """Let what follows start after these marks; on a CPU stand-in the caller itself waits for a
        GPU's.
        """
        for mark in marks:
            if not isinstance(mark, torch.cuda.Event):
                continue
            if self._stream is None:
                mark.synchronize()
            else:
                self._stream.wait_event(mark)

    def mark(self, timed: bool = False) -> Mark:
        """A mark behind all that was issued to this lane so far.

        Args:
            timed: whether the time between two marks will be asked for.
        """
        if self._stream is None:
            return perf_counter() if timed else None
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


@cache
def shared_lane(device: torch.device) -> Lane:
    """The one lane of a device for recordings of unlike owners, which never run at the same time
    then.

    Recordings share what libraries keep for the stream that they were recorded on.
    """
    return Lane(device)


class Delivery(NamedTuple):
    """One copy, or all that went with it, as it was issued, between two marks in its lane.

    Attributes:
        source: the device that it left.
        target: the device that it came to.
        began: when it did.
        ended: when it was done.
        clock: the device in whose lane both were marked.
        label: what the sender said of it.
    """

    source: torch.device
    target: torch.device
    began: Mark
    ended: Mark
    clock: torch.device
    label: Any


class Courier:
    """Copies tensors between devices beside their computations.

    Every channel between two devices has lanes of its own: a copy that waits for room holds nothing
    else back.

    Attributes:
        trace: a list that collects every copy; None, as it is at first, to collect none.
    """

    def __init__(self) -> None:
        self.trace: list[Delivery] | None = None
        self._lanes: dict[tuple[torch.device, torch.device, str], tuple[Lane, Lane]] = {}
        self._stopovers: dict[tuple[Lane, torch.Size, torch.dtype], tuple[Tensor, Mark]] = {}
        self._landings: dict[tuple[Hashable, torch.device], Tensor] = {}
        self._summands: dict[tuple[Lane, int, torch.Size, torch.dtype], Tensor] = {}

    def landing(self, key: Hashable, like: Tensor, place: torch.device) -> Tensor:
        """Memory on a device for a tensor like this one, the same for the same key again.

        The courier keeps it: memory that were let go while copies into it are under way could be
        given back to the device, by an allocator that runs short or by
        ``torch.cuda.empty_cache()``, and they would fail.

        Args:
            key: what the tensor is to the caller, who uses the memory again only when all have read
                it.
            like: of this shape, type and strides.
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
            ready: when it is there.
            target: a tensor of the same shape, on any device.
            free: when it may be overwritten; a sequence of marks where it takes several.
            channel: copies of one channel between the same two devices follow one another.
            label: what a trace is to say of the copy.

        Returns:
            When the copy is done, for both sides.
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
        """Copy all that goes from one device to another at one time, as ``send`` does; the host
        waits and marks once.

        Args:
            sources: at least one, on one device.
            ready: when all of them are there.
            targets: one for each source, on one device.
            free: when all of them may be overwritten.
            channel: as for ``send``.
            label: as for ``send``; a trace has them as one.
            adds: for each target, whether to add to what is there, which came from elsewhere, in
                place of writing over it; empty for none.

        Returns:
            When all copies are done, for both sides.
        """
        here, there = location(sources[0]), location(targets[0])
        outgoing, incoming = self._pair(here, there, channel)
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
        """A mark behind all copies of a channel so far.

        Args:
            source: the device that they leave.
            target: the device that they come to.
            channel: as for ``send``.
        """
        return self._pair(source, target, channel)[1].mark()

    def _places(
        self, targets: Sequence[Tensor], adds: Sequence[bool], incoming: Lane
    ) -> list[Tensor]:
        """Where copies go: what is added comes beside its target, where the next one is behind this
        in the lane.
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
        """Add what came beside its target."""
        adding = incoming
        # a copy to the host was in the lane of the GPU that it left
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
        """Copy to the host's memory and on; the buffer there is used again once what was in it has
        left.
        """
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
            # a copy to the host is in the lane of the GPU that it leaves
            if there.type == "cpu":
                incoming = outgoing
            self._lanes[here, there, channel] = (outgoing, incoming)
        return self._lanes[here, there, channel]


def _host_like(tensor: Tensor) -> Tensor:
    """A tensor of that shape in the host's memory, pinned where a GPU is to fill it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")


def start_reading(tensor: Tensor) -> tuple[Tensor, Mark]:
    """Start to copy a tensor into the host's memory, behind what the caller issued to its device.

    Args:
        tensor: on any device.

    Returns:
        The copy, and the mark behind which it holds the values; see ``has_passed``.
    """
    landing = _host_like(tensor)
    landing.copy_(tensor.detach(), non_blocking=True)
    return landing, Lane(location(tensor), caller=True).mark()


def has_passed(mark: Mark) -> bool:
    """Return whether a device has got to a mark, without waiting for it."""
    return not isinstance(mark, torch.cuda.Event) or bool(mark.query())  # type: ignore[no-untyped-call]
