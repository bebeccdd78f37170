"""The links between devices: latency and bandwidth of each directed pair, fitted over several sizes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from placer import devices as hardware
from placer.errors import ProfilingError
from placer.profiler.progress import Step
from placer.profiler.timing import significant
from placer.schema import Link

_HOST_SIZES = (64 * 2**10, 2**20, 8 * 2**20, 32 * 2**20)
_DEVICE_SIZES = (256 * 2**10, 4 * 2**20, 32 * 2**20, 128 * 2**20)
_REPEATS = 7


def links_to_measure(found: Sequence[torch.device]) -> int:
    """How many links are measured: each directed pair, all pairs of stand-ins as one."""
    return len({_link_key(source, target) for source in found for target in found if source != target})


def measure_links(found: Sequence[torch.device], step: Step) -> list[Link]:
    """Measure a link for each directed pair; all pairs of CPU stand-ins are one and the same.

    Raises:
        ProfilingError: bytes arrived changed.
    """
    fits: dict[tuple[str, str], tuple[float, float]] = {}
    links = []
    for source in found:
        for target in found:
            if source == target:
                continue
            key = _link_key(source, target)
            if key not in fits:
                step(f"{key[0]} -> {key[1]}")
                fits[key] = _measure_link(source, target)
            latency_s, bandwidth = fits[key]
            links.append(
                Link(source=str(source), target=str(target), latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)
            )
    return links


def _link_key(source: torch.device, target: torch.device) -> tuple[str, str]:
    """Pairs with one key share one measurement: all stand-ins are the same memory."""
    return tuple(device.type if device.type == hardware.CPU else str(device) for device in (source, target))  # type: ignore[return-value]


def _measure_link(source: torch.device, target: torch.device) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes per second from ``source`` to ``target``."""
    sizes = _HOST_SIZES if source.type == target.type == hardware.CPU else _DEVICE_SIZES
    times = []
    for size in sizes:
        sent = torch.randint(-128, 128, (size,), dtype=torch.int8, device=source)
        received = torch.zeros(size, dtype=torch.int8, device=target)
        times.append(_copy_s(sent, received, source, target))
        arrived(sent, received, source, target)
    return fit(sizes, times)


def _copy_s(sent: Tensor, received: Tensor, source: torch.device, target: torch.device) -> float:
    """The shortest of several copies: what disturbs a copy only ever makes it longer."""

    def copy() -> None:
        received.copy_(sent, non_blocking=True)

    accelerator = next((device for device in (source, target) if device.type == "cuda"), None)
    copy()
    if accelerator is not None:
        return min(hardware.queued_ms([copy], accelerator, _REPEATS)[0]) / 1e3
    samples = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        copy()
        samples.append(time.perf_counter() - began)
    return min(samples)


def arrived(sent: Tensor, received: Tensor, source: torch.device, target: torch.device) -> None:
    """Raise a ProfilingError unless the bytes are the same: some machines corrupt peer-to-peer copies silently."""
    for device in (source, target):
        hardware.synchronise(device)
    wrong = int((sent.cpu() != received.cpu()).sum())
    if wrong:
        raise ProfilingError(
            f"link {source} -> {target} is not to be trusted: {wrong} of {sent.numel()} bytes arrived changed; "
            "leave one of the two devices out"
        )


def fit(sizes: Sequence[int], times_s: Sequence[float]) -> tuple[float, float]:
    """The latency and bandwidth of ``time = latency + size / bandwidth`` with the least squared relative error.

    Args:
        sizes: in bytes, at least two different ones.
        times_s: measured, in seconds.

    Returns:
        Latency in seconds, at least 0, and bandwidth in bytes per second; where the line does not rise, the bandwidth
        is that of the largest size.
    """
    weights = [1 / max(t, 1e-9) ** 2 for t in times_s]
    total = sum(weights)
    mean_size = sum(w * n for w, n in zip(weights, sizes, strict=True)) / total
    mean_time = sum(w * t for w, t in zip(weights, times_s, strict=True)) / total
    spread = sum(w * (n - mean_size) ** 2 for w, n in zip(weights, sizes, strict=True))
    slope = sum(w * (n - mean_size) * (t - mean_time) for w, n, t in zip(weights, sizes, times_s, strict=True)) / spread
    if slope <= 0:
        return 0.0, significant(sizes[-1] / max(times_s[-1], 1e-9))
    latency = mean_time - slope * mean_size
    if latency < 0:  # a line through the origin
        slope = sum(w * n * t for w, n, t in zip(weights, sizes, times_s, strict=True)) / sum(
            w * n * n for w, n in zip(weights, sizes, strict=True)
        )
    return significant(max(0.0, latency)), significant(1 / slope)
