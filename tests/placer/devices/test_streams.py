"""The streams of a device are handed out again and again: none of a recording's to a lane."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest
import torch

from placer.devices import streams

DEVICE = torch.device("cuda", 0)


class _Stream:
    """As torch hands them out: 32 in turn."""

    turn = itertools.count()

    def __init__(self, device: torch.device) -> None:
        self.cuda_stream = next(self.turn) % streams.POOL


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(streams, "_of_lanes", defaultdict(list))
    monkeypatch.setattr(streams, "_of_recordings", defaultdict(set))


def test_no_lane_has_a_stream_of_recordings() -> None:
    recording = {streams.stream_of_recordings(DEVICE).cuda_stream for _ in range(2)}
    lanes: list[Any] = [streams.stream_of_lane(DEVICE) for _ in range(100)]
    assert len(recording) == 2 and recording.isdisjoint(lane.cuda_stream for lane in lanes)


def test_a_recording_takes_a_stream_that_no_living_lane_has() -> None:
    lanes: list[Any] = [streams.stream_of_lane(DEVICE) for _ in range(31)]
    left = ({*range(32)} - {lane.cuda_stream for lane in lanes}).pop()
    gone = streams.stream_of_lane(DEVICE).cuda_stream
    assert streams.stream_of_recordings(DEVICE).cuda_stream == left == gone


def test_where_lanes_have_all_streams_a_recording_has_one_of_theirs() -> None:
    lanes: list[Any] = [streams.stream_of_lane(DEVICE) for _ in range(32)]
    assert streams.stream_of_recordings(DEVICE).cuda_stream in {lane.cuda_stream for lane in lanes}
