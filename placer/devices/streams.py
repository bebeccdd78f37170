"""CUDA streams of the library's own: torch hands out the same 32 of a device again and again.

Lanes that have one stream work one after another, which costs time alone. But what one thread issues to a stream on
which another one records would go into the recording, or break it off. So lanes and recordings share none, as long as
there are others.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from weakref import ref

import torch

POOL = 32
"""So many streams of a device there are."""

_lock = threading.Lock()
_of_lanes: dict[torch.device, list[ref[torch.cuda.Stream]]] = defaultdict(list)
_of_recordings: dict[torch.device, set[int]] = defaultdict(set)


def stream_of_lane(device: torch.device) -> torch.cuda.Stream:
    """One on which nothing is recorded."""
    with _lock:
        stream = _other_than(_of_recordings[device], device)
        _of_lanes[device] = [known for known in _of_lanes[device] if known() is not None] + [ref(stream)]
        return stream


def stream_of_recordings(device: torch.device) -> torch.cuda.Stream:
    """One that no lane has, now or later."""
    with _lock:
        lanes = [stream for known in _of_lanes[device] if (stream := known()) is not None]
        stream = _other_than({lane.cuda_stream for lane in lanes} | _of_recordings[device], device)
        _of_recordings[device].add(stream.cuda_stream)
        return stream


def _other_than(taken: set[int], device: torch.device) -> torch.cuda.Stream:
    """One that is not taken; any, where all are."""
    for _ in range(POOL):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if stream.cuda_stream not in taken:
            break
    return stream
