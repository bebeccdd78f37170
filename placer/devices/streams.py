"""CUDA streams for lanes and recordings, kept apart where possible.

Torch hands out the same 32 streams of a device repeatedly. Two lanes on one stream run one after
the other, which only costs time. But work that one thread issues to a stream while another thread
records on it would enter the recording or break it off. Therefore lanes and recordings share no
stream, as long as the pool has others.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from weakref import WeakKeyDictionary

import torch

POOL = 32
"""Number of streams per device in torch's pool (c10/cuda/CUDAStream.cpp)."""

_lock = threading.Lock()
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
