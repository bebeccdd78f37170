"""Blocks of host memory for weights that devices copy."""

from __future__ import annotations

import pytest
import torch

from placer.devices import PinnedBlocks, aligned_bytes, pinned_memory, views
from placer.errors import PlacementError


def test_tensors_follow_one_another_in_blocks_and_keep_values_and_strides() -> None:
    tensors = [
        torch.randn(3, 5),
        torch.randn(4, 6).t(),
        torch.arange(7, dtype=torch.int16),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(6, 4)[:, ::2],
        torch.empty(0, 3),
    ]
    blocks = PinnedBlocks(sum(map(aligned_bytes, tensors)))
    copies = [blocks.copied(one) for one in tensors]
    for copied, one in zip(copies, tensors, strict=True):
        assert torch.equal(copied, one) and copied.dtype == one.dtype
    assert [one.stride() for one in copies[:4]] == [one.stride() for one in tensors[:4]]
    assert copies[4].is_contiguous()
    (address,) = {one.untyped_storage().data_ptr() for one in copies if one.numel()}
    for copied in copies:
        assert (copied.data_ptr() - address) % 512 == 0 or not copied.numel()


def test_a_full_block_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "BLOCK_BYTES", 1024)
    tensors = [torch.full((100,), float(number)) for number in range(5)]
    tensors.append(torch.ones(1000))
    blocks = PinnedBlocks(sum(map(aligned_bytes, tensors)))
    copies = [blocks.copied(one) for one in tensors]
    sizes = [one.untyped_storage().nbytes() for one in copies]
    assert sizes == [1024, 1024, 1024, 1024, 1024, 4096]
    assert all(map(torch.equal, copies, tensors))


def test_views_of_a_slot_have_the_shapes_of_all_tensors() -> None:
    tensors = [torch.ones(3, 3, dtype=torch.bfloat16), torch.zeros(5)]
    memory = torch.empty(sum(map(aligned_bytes, tensors)), dtype=torch.uint8)
    found = views(memory, tensors)
    for view, one in zip(found, tensors, strict=True):
        view.copy_(one)
    assert all(map(torch.equal, found, tensors))


def test_missing_host_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    blocks = PinnedBlocks(4096)
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(PlacementError, match=r"the host has no 4\.0 KiB of memory more"):
        blocks.copied(torch.ones(1024))
