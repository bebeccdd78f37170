"""On real GPUs: what a recording that fails leaves behind."""

from __future__ import annotations

import gc

import pytest
import torch

from placer import devices
from placer.devices.recording import recorder

MIB = 2**20


@pytest.mark.gpu
def test_a_recording_that_fails_keeps_no_memory() -> None:
    place = torch.device("cuda", 0)
    # libraries take what they keep
    devices.record([lambda: torch.ones(1, device=place)], place)

    def forbidden() -> None:
        made = torch.ones(64 * MIB, dtype=torch.uint8, device=place)
        if devices.recording():
            torch.cuda.synchronize(place)  # a capture is broken off by it
        made.add_(1)

    gc.collect()  # what earlier tests left in cycles
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(place)
    with pytest.raises(devices.NotRecordable):
        devices.record([forbidden], place)
    gc.collect()  # the error has the frame that made something
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(place) == before


@pytest.mark.gpu
def test_after_a_recording_that_failed_memory_that_two_streams_used_is_given_back() -> None:
    place = torch.device("cuda", 0)

    def forbidden() -> None:
        if devices.recording():
            torch.cuda.synchronize(place)
        torch.ones(1, device=place)

    with pytest.raises(devices.NotRecordable):
        devices.record([forbidden], place)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(place)
    other = torch.cuda.Stream(place)
    used = torch.ones(64 * MIB, dtype=torch.uint8, device=place)
    used.record_stream(other)
    del used
    torch.cuda.synchronize(place)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(place) == before


@pytest.mark.gpu
@pytest.mark.parametrize("freed_by", ["another recording", "torch.compile"])
def test_a_recording_works_on_after_torch_has_freed_its_workspace(freed_by: str) -> None:
    place = torch.device("cuda", 0)
    # the sum over many rows is split, and its parts lie in the workspace
    left, right = torch.randn(2, 32768, 640, device=place, dtype=torch.bfloat16)
    product = torch.empty(640, 640, device=place, dtype=torch.bfloat16)
    (replay,) = devices.record([lambda: torch.mm(left.T, right, out=product)], place)
    replay()
    expected = product.clone()
    devices.record([lambda: torch.mm(left.T, right)], place)  # the graph is deleted at once
    gc.collect()
    if freed_by == "torch.compile":
        torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.stream(recorder(place).stream):
        held = [torch.zeros(4 * MIB, dtype=torch.uint8, device=place) for _ in range(32)]
    torch.cuda.synchronize(place)
    torch.cuda.empty_cache()
    replay()
    torch.cuda.synchronize(place)
    assert torch.equal(product, expected)
    assert not any(one.any() for one in held)
