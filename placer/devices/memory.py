"""The memory of devices, the memory that work takes, and host memory for weights.

A GPU copies asynchronously only from pinned memory. Torch rounds each pinned allocation up to a
power of two, so weights that a GPU copies again and again are packed into large blocks, whose sizes
are powers of two::

    block of 1 GiB    │ up_proj      │ down_proj    │ q_proj │ ... │ unused │
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from placer.devices.names import RECORDING, synchronise
from placer.devices.recording import recorder
from placer.devices.routes import HOST
from placer.utils import host_memory

BLOCK_BYTES = 1 << 30
"""Bytes of a block of pinned memory. A larger tensor has a block of its own."""

ALIGNMENT_BYTES = 512
"""Alignment of tensors in a block, which is also the one of torch's allocators for GPUs."""


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return the device's free and total memory, in bytes.

    A stand-in shares the memory of the machine, or of the container, with all others.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    total = host_memory.total_bytes()
    return min(total, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")), total


def unused_bytes(device: torch.device) -> int:
    """Return the bytes that work on a device may still take, its allocator's cache included."""
    free, _ = memory_bytes(device)
    if device.type != "cuda":
        return free
    reserved, held = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    return free + int(reserved) - int(held)


def counts_bytes(device: torch.device) -> bool:
    """Return whether an allocator counts the memory held on the device."""
    return device.type == "cuda"


def peak_bytes(device: torch.device, run: Callable[[], Any]) -> int | None:
    """Return the peak memory of ``run`` in bytes, beyond what was held before.

    None if no allocator counts it.
    """
    if not counts_bytes(device):
        run()
        return None
    synchronise(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    synchronise(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def fragmented_bytes(device: torch.device) -> int:
    """Return the peak of unusable free memory since ``peak_bytes`` last began, in bytes.

    Torch's allocator takes memory in segments of 2, 20 or more MiB. The free rest of a segment that
    still holds a tensor cannot go back to the device, and larger tensors do not fit into it. 0 if
    no allocator counts.
    """
    if not counts_bytes(device):
        return 0
    return int(torch.cuda.memory_stats(device).get("inactive_split_bytes.all.peak", 0))


def context_bytes(device: torch.device) -> int:
    """Return the used device memory outside torch's allocator, in bytes.

    This covers CUDA contexts, kernels and other programs.
    """
    if device.type != "cuda":
        return 0
    synchronise(device)
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total) - int(free) - int(torch.cuda.memory_reserved(device)))


def cache_bytes(device: torch.device) -> int:
    """Return the size of the device's last-level cache in bytes (L2 on CUDA); 0 if unknown."""
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))


def library_bytes(device: torch.device) -> int:
    """Return the bytes that libraries keep for the recording streams (workspaces)."""
    return recorder(device).library_bytes if device.type == "cuda" else 0


def release_cache() -> None:
    """Return cached, unused memory to the devices."""
    if torch.cuda.is_available():
        # freeing device memory would break a recording of another thread off
        with RECORDING:
            torch.cuda.empty_cache()


def aligned_bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes in a block."""
    size = tensor.numel() * tensor.element_size()
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill the memory between its first and its last."""
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return prod(tensor.shape) in (extent, 0)


def views(memory: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a block, one after another, with the shapes and strides of these tensors.

    Args:
        memory: bytes, shape ``(N,)``; N is at least the sum of the tensors' ``aligned_bytes``.
        tensors: plain; those that are not dense get the strides of contiguous tensors.
    """
    found, offset = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        flat = memory[offset : offset + size].view(tensor.dtype)
        dense = is_dense(tensor)
        found.append(
            flat.as_strided(tensor.shape, tensor.stride()) if dense else flat.view(tensor.shape)
        )
        offset += aligned_bytes(tensor)
    return found


class PinnedBlocks:
    """Blocks of host memory for tensors, which are copied there one after another.

    Args:
        size_bytes: the sum of the tensors' ``aligned_bytes``.
    """

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes
        self._block, self._used = torch.empty(0, dtype=torch.uint8, device=HOST), 0

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in a block.

        Args:
            tensor: plain, on the host.
        """
        size = aligned_bytes(tensor)
        if self._used + size > self._block.numel():
            wanted = max(size, min(BLOCK_BYTES, _power_of_two(self._left)))
            self._block, self._used = (
                torch.empty(
                    wanted, dtype=torch.uint8, device=HOST, pin_memory=torch.cuda.is_available()
                ),
                0,
            )
        (copied,) = views(self._block[self._used : self._used + size], [tensor])
        self._used, self._left = self._used + size, self._left - size
        return copied.copy_(tensor)


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
