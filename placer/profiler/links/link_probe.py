"""Latency and bandwidth of one directed link under several loads, and its correctness.

The received bytes are compared at the target with a pattern that came there from the host, so a
link never verifies itself. They are compared after isolated copies, after copies in both
directions, and after copies during computations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from placer import devices as hardware
from placer.profiler.timing import significant
from placer.schema import Rate

HOST_SIZES = (64 * 2**10, 2**20, 8 * 2**20, 32 * 2**20)
DEVICE_SIZES = (256 * 2**10, 4 * 2**20, 32 * 2**20, 128 * 2**20)
_REPEATS = 7
_TILE = 1_048_573  # a prime: the pattern has no period that is a power of two


class Changed(Exception):
    """A report of corrupted bytes.

    Attributes:
        wrong: number of corrupted bytes.
        size_bytes: number of bytes copied.
    """

    def __init__(self, wrong: int, size_bytes: int) -> None:
        super().__init__(f"{wrong} of {size_bytes} bytes arrived changed")
        self.wrong, self.size_bytes = wrong, size_bytes


def check(source: torch.device, target: torch.device, size_bytes: int = HOST_SIZES[0]) -> None:
    """Copy once and compare.

    Args:
        source: a device, or the host.
        target: a device, or the host.
        size_bytes: bytes to copy (default 64 KiB).

    Raises:
        Changed: if bytes arrived corrupted.
    """
    item = _shipment(source, target, size_bytes)
    item.go()
    _compare(item)


def rate(
    source: torch.device,
    target: torch.device,
    *,
    bidirectional: bool = False,
    computing: bool = False,
) -> Rate:
    """Measure latency and bandwidth of a link.

    Args:
        source: a device, or the host.
        target: a device, or the host; at least one of the two is a device.
        bidirectional: copy equally much in the other direction at the same time.
        computing: multiply matrices on the GPUs among the two at the same time.

    Returns:
        The line fitted through the times of several sizes.

    Raises:
        Changed: if bytes arrived corrupted.
    """
    # torch keeps pinned host memory for the rest of the process, so host copies are smaller
    sizes = DEVICE_SIZES if source.type == target.type == "cuda" else HOST_SIZES
    # a CPU stand-in computes on the cores that copy, so it has no separate load
    busy = [device for device in (source, target) if device.type == "cuda"] if computing else []
    times: list[float] = []
    for size in sizes:
        items = [_shipment(source, target, size)] + (
            [_shipment(target, source, size)] if bidirectional else []
        )
        # upper estimate for the next size: sizes grow up to 16-fold, and load slows copies down
        slowest_s = max(1e-3, 40 * times[-1] if times else 0)
        times.append(hardware.copy_s(items, _REPEATS, busy, min(1.0, _REPEATS * slowest_s))[0])
        _compare(items[0])  # the reverse direction is verified by its own measurement
    latency_s, bandwidth = fit(sizes, times)
    return Rate(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)


def through_host(to_host: Rate, from_host: Rate) -> Rate:
    """Return the rate of two copies in sequence, by way of the host."""
    seconds_per_byte = 1 / to_host.bandwidth_bytes_per_s + 1 / from_host.bandwidth_bytes_per_s
    return Rate(
        latency_s=significant(to_host.latency_s + from_host.latency_s),
        bandwidth_bytes_per_s=significant(1 / seconds_per_byte),
    )


def _shipment(source: torch.device, target: torch.device, size_bytes: int) -> hardware.Shipment:
    sent = pattern(size_bytes, source)
    received = torch.zeros(size_bytes, dtype=torch.int8, device=target)
    # pinned host memory, as fast copies use it
    if "cuda" in (source.type, target.type):
        sent, received = (
            tensor.pin_memory() if tensor.device == hardware.HOST else tensor
            for tensor in (sent, received)
        )
    return hardware.Shipment(sent, received, source, target)


def _compare(item: hardware.Shipment) -> None:
    for device in (item.source, item.target):
        hardware.synchronise(device)
    expected = pattern(item.received.numel(), item.target)
    # counting takes several times as long as comparing
    if not torch.equal(item.received, expected):
        raise Changed(int((item.received != expected).sum()), item.received.numel())


def pattern(size_bytes: int, device: torch.device = hardware.HOST) -> Tensor:
    """Return bytes known to every process and device, of which only one tile is transferred."""
    return _tile().to(device).repeat(-(-size_bytes // _TILE))[:size_bytes]


@cache
def _tile() -> Tensor:
    generator = torch.Generator().manual_seed(_TILE)
    return torch.randint(-128, 128, (_TILE,), dtype=torch.int8, generator=generator)


def fit(sizes: Sequence[int], times_s: Sequence[float]) -> tuple[float, float]:
    """Fit ``time = latency + size / bandwidth`` with the least squared relative error.

    Args:
        sizes: bytes; at least two different sizes.
        times_s: measured seconds.

    Returns:
        Latency in seconds, at least 0, and bandwidth in bytes per second. If the times do not
        increase with size, the largest size alone determines the bandwidth.
    """
    weights = 1 / np.maximum(times_s, 1e-9)  # of a relative error
    slope, latency_s = np.polyfit(sizes, times_s, 1, w=weights)
    if slope <= 0:
        return 0.0, significant(sizes[-1] / max(times_s[-1], 1e-9))
    if latency_s < 0:  # a negative latency has no meaning: fit a line through the origin
        scaled = weights * sizes
        latency_s, slope = 0.0, scaled @ (weights * times_s) / (scaled @ scaled)
    return significant(float(latency_s)), significant(float(1 / slope))
