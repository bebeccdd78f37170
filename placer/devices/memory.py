"""How much memory devices have, and how much of it work takes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from placer.devices.names import RECORDING, synchronise
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


def counts_bytes(device: torch.device) -> bool:
    """Whether an allocator counts what the device holds."""
    return device.type == "cuda"


def peak_bytes(device: torch.device, run: Callable[[], Any]) -> int | None:
    """The most memory that ``run`` held beyond what was held before it, in bytes; None where no
    allocator counts it.
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
    """The most memory that stood empty beside tensors since ``peak_bytes`` last began, in bytes; 0
    where nobody counts.

    Torch's allocator takes memory in segments, of 2, 20 or more MiB. What is left of one that holds
    a tensor it cannot give back, and larger tensors do not fit there.
    """
    if not counts_bytes(device):
        return 0
    return int(torch.cuda.memory_stats(device).get("inactive_split_bytes.all.peak", 0))


def context_bytes(device: torch.device) -> int:
    """What the device holds that torch's allocator does not count, in bytes: contexts, kernels,
    other programs.
    """
    if device.type != "cuda":
        return 0
    synchronise(device)
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total) - int(free) - int(torch.cuda.memory_reserved(device)))


def cache_bytes(device: torch.device) -> int:
    """The bytes of the cache that all of a device's cores share (L2 on CUDA); 0 where it is not
    known.
    """
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))


def library_bytes(device: torch.device) -> int:
    """What libraries keep of torch's memory once they have run on the streams of recordings, in
    bytes.
    """
    return recorder(device).library_bytes if device.type == "cuda" else 0


def release_cache() -> None:
    """Give cached, unused device memory back."""
    if torch.cuda.is_available():
        with RECORDING:
            torch.cuda.empty_cache()
