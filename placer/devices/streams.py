"""CUDA streams for lanes and recordings, kept apart where possible.

Torch hands out the same 32 streams of a device repeatedly. Two lanes on one stream run one after
the other, which only costs time. But work that one thread issues to a stream while another thread
records on it would enter the recording or break it off. Therefore lanes and recordings share no
stream, as long as the pool has others.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

POOL = 32
"""Number of streams per device in torch's pool (c10/cuda/CUDAStream.cpp)."""

# Reentrant: the garbage collector may drop side streams while this thread takes some.
_lock = threading.RLock()
# By owner and not by stream: a weak reference to a torch.cuda.Stream crashes the process (torch
# 2.11).
_lanes: defaultdict[torch.device, WeakKeyDictionary[object, int]] = defaultdict(WeakKeyDictionary)
_recordings: defaultdict[torch.device, set[int]] = defaultdict(set)


def stream_of_lane(device: torch.device, owner: object) -> torch.cuda.Stream:
    """Return a stream on which nothing is recorded.

    Args:
        device: a CUDA device.
        owner: the lane; no recording gets this stream while the owner exists.
    """
    with _lock:
        stream = _stream_outside(_recordings[device], device)
        _lanes[device][owner] = stream.cuda_stream
        return stream


def stream_of_recordings(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that no lane has, now or later."""
    with _lock:
        stream = _stream_outside({*_lanes[device].values(), *_recordings[device]}, device)
        _recordings[device].add(stream.cuda_stream)
        return stream


def _stream_outside(taken: set[int], device: torch.device) -> torch.cuda.Stream:
    """Return a stream that is not taken, or any stream if all are."""
    for _ in range(POOL):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if stream.cuda_stream not in taken:
            break
    return stream


_MOST_APART = 15
"""Streams per device for threads of their own; about as many are left for lanes."""

_apart: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)
_apart_counts: defaultdict[torch.device, int] = defaultdict(int)


class SideStreams:
    """One stream per device, for the work and the recordings of one thread at a time.

    Graphs that were recorded on one stream share the workspaces of libraries. Graphs on different
    side streams share none, so that their replays may overlap.

        caller's stream   ──┬─────────────────────┬──
        side stream         └── work in the block ┘

    Streams of an object that is dropped serve other threads again, as after ``release``.

    Args:
        places: the devices; those without streams are skipped.

    Raises:
        NoStreamsError: if all are in use.
    """

    def __init__(self, places: Iterable[torch.device]) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._callers: dict[torch.device, torch.cuda.Stream] = {}
        self._give_back = finalize(self, _give_back, self._streams)
        self._give_back.atexit = False
        for place in places:
            if place.type == "cuda":
                try:
                    self._streams[place] = _taken_apart(place)
                except NoStreamsError:
                    self.release()
                    raise

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the stream of a device; None if it has none."""
        return self._streams.get(device)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let this thread's work inside go into these streams, and wait for it at the end."""
        self._callers = {place: torch.cuda.current_stream(place) for place in self._streams}
        try:
            with self.ahead():
                yield
        finally:
            self._callers = {}
            self.catch_up()
            # The next block may be another thread's, whose streams know nothing of this work.
            for stream in self._streams.values():
                stream.synchronize()

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Let this thread's work inside go into these streams, after what came before.

        The caller's streams do not wait for it until ``catch_up``. Each device needs a stream of
        its own for that: a copy to another device in the default stream waits for all work on both,
        and later work on both waits for it.
        """
        if not self._streams:
            yield
            return
        device = torch.cuda.current_device()
        callers = {place: torch.cuda.current_stream(place) for place in self._streams}
        try:
            for place, stream in self._streams.items():
                stream.wait_stream(callers[place])
                torch.cuda.set_stream(stream)
            torch.cuda.set_device(device)  # ``set_stream`` changes it
            yield
        finally:
            for caller in callers.values():
                torch.cuda.set_stream(caller)
            torch.cuda.set_device(device)

    def catch_up(self) -> None:
        """Let the caller's further work wait for the work in these streams."""
        for place, stream in self._streams.items():
            torch.cuda.current_stream(place).wait_stream(stream)

    def hand_over(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor until the caller's work on it is done.

        Args:
            tensor: made in the block, for use after it.
        """
        caller = self._callers.get(tensor.device)
        if caller is not None:
            tensor.record_stream(caller)

    def release(self) -> None:
        """Give the streams back, for other threads."""
        self._give_back()


def _give_back(streams: dict[torch.device, torch.cuda.Stream]) -> None:
    with _lock:
        for place, stream in streams.items():
            _apart[place].append(stream)
        streams.clear()


class NoStreamsError(Exception):
    """All streams for threads of their own are in use."""


def _taken_apart(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that no lane and no recording has, now or later."""
    with _lock:
        if _apart[device]:
            return _apart[device].pop()
        taken = {*_lanes[device].values(), *_recordings[device]}
        stream = _stream_outside(taken, device)
        if _apart_counts[device] >= _MOST_APART or stream.cuda_stream in taken:
            raise NoStreamsError
        _apart_counts[device] += 1
        _recordings[device].add(stream.cuda_stream)
        return stream


def keep_for_caller(tensor: Tensor) -> None:
    """Keep the memory of another thread's tensor until this thread's work on it is done.

    Args:
        tensor: complete, on any device.
    """
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
