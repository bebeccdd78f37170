"""The memory of devices, and the memory that work takes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from placer.devices.names import RECORDING, synchronise, synchronise_all
from placer.devices.recording import recorder
from placer.utils import host_memory


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
    return free + reserved_bytes(device) - int(torch.cuda.memory_allocated(device))


def reserved_bytes(device: torch.device) -> int:
    """Return the bytes that the device's allocator has taken; 0 if no allocator counts."""
    return int(torch.cuda.memory_reserved(device)) if counts_bytes(device) else 0


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
    return max(0, int(total) - int(free) - reserved_bytes(device))


def cache_bytes(device: torch.device) -> int:
    """Return the size of the device's last-level cache in bytes (L2 on CUDA); 0 if unknown."""
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))


def library_bytes(device: torch.device) -> int:
    """Return the bytes that libraries keep for the recording streams (workspaces)."""
    return recorder(device).library_bytes if device.type == "cuda" else 0


def release_cache() -> None:
    """Return cached, unused memory to the devices, once all of them have finished their work.

    CUDA does not wait for a copy from another device into the memory that it frees, and such a copy
    then breaks the process's work off (https://github.com/pytorch/pytorch/issues/196257).
    """
    if torch.cuda.is_available():
        # freeing device memory would break a recording of another thread off
        with RECORDING:
            synchronise_all()
            torch.cuda.empty_cache()
