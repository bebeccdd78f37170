"""torch returns a device's 32 streams repeatedly: lanes and recordings share no stream."""

from __future__ import annotations

import itertools

import pytest
import torch

from placer.devices import streams

DEVICE = torch.device("cuda", 0)


class _Stream:
    """A stand-in for torch.cuda.Stream; like it in torch 2.11 it has no weak references."""

    __slots__ = ("cuda_stream",)
    numbers = itertools.count()

    def __init__(self, device: torch.device) -> None:
        self.cuda_stream = next(self.numbers) % streams.POOL


class _Lane:
    def __init__(self) -> None:
        self.number = streams.stream_of_lane(DEVICE, self).cuda_stream


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    streams._lanes.pop(DEVICE, None)
    streams._recordings.pop(DEVICE, None)
    streams._apart.pop(DEVICE, None)
    streams._apart_counts.pop(DEVICE, None)


def test_no_lane_has_a_stream_of_recordings() -> None:
    recording = {streams.stream_of_recordings(DEVICE).cuda_stream for _ in range(2)}
    lanes = [_Lane() for _ in range(100)]
    assert len(recording) == 2 and recording.isdisjoint(lane.number for lane in lanes)


def test_a_recording_takes_a_stream_that_no_living_lane_has() -> None:
    lanes = [_Lane() for _ in range(31)]
    left = ({*range(32)} - {lane.number for lane in lanes}).pop()
    gone = _Lane().number
    assert streams.stream_of_recordings(DEVICE).cuda_stream == left == gone


def test_a_recording_shares_a_stream_when_lanes_have_all() -> None:
    lanes = [_Lane() for _ in range(32)]
    assert streams.stream_of_recordings(DEVICE).cuda_stream in {lane.number for lane in lanes}


def test_side_streams_serve_others_once_they_are_released_or_dropped() -> None:
    taken = []
    with pytest.raises(streams.NoStreamsError):
        while True:
            taken.append(streams.SideStreams([DEVICE]))
    stream = taken[-1].stream(DEVICE)
    assert taken[0].stream(DEVICE) is not None is not stream
    del taken[-1]
    other = streams.SideStreams([DEVICE])
    assert other.stream(DEVICE) is stream
    other.release()
    other.release()
    assert other.stream(DEVICE) is None
    assert streams.SideStreams([DEVICE]).stream(DEVICE) is stream
