"""Devices and links: memory limits, reserves, latencies and bandwidths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import MappingProxyType

import torch

from placer import devices as hardware
from placer.devices import DeviceLike
from placer.errors import InputError
from placer.profiler.cache.file_cache import Cache, CacheLike, open_cache
from placer.profiler.links.disk_rate import disk_rate, known_rate
from placer.profiler.links.links import Ports, evened, links_to_measure, measure_links
from placer.profiler.progress import Shown, Step, progress_bar
from placer.schema import Cluster, Device
from placer.utils.units import parse_bytes

MemoryLimit = int | str | Mapping[DeviceLike, int | str] | None
"""Bytes that a placement may use: on every device, by device, or None for all memory. A text has a
unit, such as ``"24GiB"``."""


def measure_cluster(
    devices: int | Sequence[DeviceLike] | None = None,
    *,
    memory_bytes: MemoryLimit = None,
    progress: Shown = True,
    cache: CacheLike = False,
    disk_folder: str | PathLike[str] | None = None,
) -> Cluster:
    """Measure devices and links.

    A CUDA device's reserve is its memory use outside the model's tensors: contexts and kernels of
    all programs, and cuBLAS workspaces. In a profile, it also covers fragmentation. CPU stand-ins
    share the machine's memory evenly and have no reserve. A copy between two of them is a copy
    within host memory; it is measured once and used for all pairs.

    Args:
        devices: a count, a list of devices, or None (default) for all.
        memory_bytes: bytes that a placement may use, for every device or by device; None (default)
            for all of its memory.
        progress: whether to show a progress bar.
        cache: whether to reuse links measured since the machine started, see ``profile``.
        disk_folder: whose disk is measured, see ``ProfileOptions``; None (default) for none.

    Returns:
        The devices, and a link for each directed pair.

    Raises:
        InputError: if a device is missing, or a limit is not positive or exceeds the device's
            memory.
        ProfilingError: if bytes between a device and its host arrived corrupted, or a copy failed.
    """
    found = hardware.resolve(devices)
    limits = resolve_limits(found, memory_bytes)
    kept = open_cache(cache)
    disk = None if disk_folder is None else hardware.disk_folder(disk_folder)
    with progress_bar(progress, steps(found, kept, disk)) as step:
        return measure(found, limits, step, kept, disk=disk)


def steps(found: Sequence[torch.device], cache: Cache | None, disk: Path | None = None) -> int:
    """Return the number of steps of ``measure``, which takes the same arguments."""
    of_disk = int(disk is not None and known_rate(disk, cache) is None)
    return links_to_measure(found, cache) + of_disk


def measure(
    found: Sequence[torch.device],
    limits: Mapping[torch.device, int],
    step: Step,
    cache: Cache | None = None,
    fragmented_bytes: Mapping[str, int] = MappingProxyType({}),
    disk: Path | None = None,
) -> Cluster:
    """Measure devices that are known to exist, as ``measure_cluster`` does.

    Args:
        found: the devices.
        limits: the bytes that a placement may use, by device.
        step: called with a description when a measurement begins.
        cache: stores link measurements.
        fragmented_bytes: by device type, the fragmentation next to a model's tensors; added to the
            reserve.
        disk: the folder whose disk is measured; None for none.
    """
    with hardware.unobserved(), hardware.keep_random_state(found):
        # links first: enabling peer access takes device memory, which the reserve must include
        measured = measure_links(found, step, cache)
        from_disk = None if disk is None else disk_rate(disk, step, cache)
        hardware.release_cache()
        described = [
            _describe(
                device, found, limits.get(device), measured.ports.get(device), fragmented_bytes
            ).model_copy(update={"from_disk": from_disk})
            for device in found
        ]
        links = evened(measured.links, {device.name: device.type for device in described})
        return Cluster(devices=tuple(described), links=tuple(links))


def resolve_limits(
    found: Sequence[torch.device], memory_bytes: MemoryLimit
) -> dict[torch.device, int]:
    """Return the user's memory limits by device, in bytes.

    Raises:
        InputError: if a limit is not a size, is not positive, exceeds the device's memory, or names
            another device.
    """
    if memory_bytes is None:
        return {}
    if isinstance(memory_bytes, Mapping):
        limits = {hardware.parse(device): _bytes(one) for device, one in memory_bytes.items()}
    else:
        limits = dict.fromkeys(found, _bytes(memory_bytes))
    for device, limit in limits.items():
        if device not in found:
            raise InputError(
                f"memory_bytes names {device}, which is not in {', '.join(map(str, found))}"
            )
        if not isinstance(limit, int) or isinstance(limit, bool) or limit <= 0:
            raise InputError(
                f"memory_bytes of {device} is {limit!r}; give a positive whole number of bytes, or "
                "a size such as '24GiB'"
            )
        total = hardware.memory_bytes(device)[1]
        if device.type == "cuda" and limit > total:
            raise InputError(
                f"memory_bytes of {device} is {limit}, but the device has {total} bytes; give "
                f"{total} or less"
            )
    return limits


def _bytes(limit: int | str) -> int:
    """Return a limit in bytes; other types are refused later, with the device."""
    return parse_bytes(limit) if isinstance(limit, str) else limit


def _describe(
    device: torch.device,
    found: Sequence[torch.device],
    limit: int | None,
    ports: Ports | None,
    fragmented_bytes: Mapping[str, int],
) -> Device:
    total = hardware.memory_bytes(device)[1]
    if device.type == hardware.CPU:
        # stand-ins share the host's memory evenly
        total //= sum(other.type == hardware.CPU for other in found)
        reserve = 0
    else:
        fragments = fragmented_bytes.get(hardware.type_name(device), 0)
        reserve = min(
            total, hardware.library_bytes(device) + hardware.context_bytes(device) + fragments
        )
    #     |------------------- total -------------------|
    #     |------- limit -------|           | reserve |     no overlap: the reserve becomes 0
    #     |------------- limit -----------------|         |     overlap: limit + reserve - total
    memory = total if limit is None else limit
    # The limit is usable memory, if total memory covers limit and reserve; the excess reduces it.
    reserve = (
        reserve
        if limit is None
        else max(0, limit - (total - reserve))
        if device.type == "cuda"
        else 0
    )
    return Device(
        name=str(device),
        type=hardware.type_name(device),
        memory_bytes=memory,
        reserve_bytes=reserve,
        host=hardware.host_name(),
        to_host=ports.to_host if ports else None,
        from_host=ports.from_host if ports else None,
    )
