"""The devices and the links between them: memory limits, reserves, latencies and bandwidths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from placer import devices as hardware
from placer.devices import DeviceLike
from placer.errors import InputError
from placer.profiler.cache.file_cache import Cache, CacheLike, open_cache
from placer.profiler.links.links import Ports, evened, links_to_measure, measure_links
from placer.profiler.progress import Shown, Step, progress_bar
from placer.schema import Cluster, Device

MemoryLimit = int | Mapping[DeviceLike, int] | None
"""Bytes that a placement may use: on every device, by device, or all that there is."""


def measure_cluster(
    devices: int | Sequence[DeviceLike] | None = None,
    *,
    memory_bytes: MemoryLimit = None,
    progress: Shown = True,
    cache: CacheLike = False,
) -> Cluster:
    """Measure devices and links.

    A CUDA device's reserve is what it holds beside torch's tensors: contexts and kernels of this
    and other programs, and the workspace of cuBLAS, both measured; in a profile also what stands
    empty beside the tensors of the model's layers. CPU stand-ins share the machine's memory evenly
    and have no reserve; a copy between two of them is a copy inside the machine's memory, measured
    once and used for all.

    Args:
        devices: a count, a list of devices, or None for all.
        memory_bytes: what a placement may use, in bytes, of every device or by device; None for all
            of its memory.
        progress: whether to show a bar.
        cache: whether links that were measured since the machine started are taken from the cache,
            see ``profile``.

    Returns:
        The devices, and a link for each directed pair.

    Raises:
        InputError: a device is not there, or a limit is not positive or above the device's memory.
        ProfilingError: bytes between a device and its host arrived changed, or a copy failed.
    """
    found = hardware.resolve(devices)
    limits = resolve_limits(found, memory_bytes)
    kept = open_cache(cache)
    with progress_bar(progress, links_to_measure(found, kept)) as step:
        return measure(found, limits, step, kept)


def measure(
    found: Sequence[torch.device],
    limits: Mapping[torch.device, int],
    step: Step,
    cache: Cache | None = None,
    fragmented_bytes: Mapping[str, int] = MappingProxyType({}),
) -> Cluster:
    """As ``measure_cluster``, on devices that are known to be there.

    Args:
        found: the devices.
        limits: what a user lets a placement take, by device.
        step: told what begins.
        cache: where links are kept.
        fragmented_bytes: by device type, what stands empty beside a model's tensors; the reserve
            has it, too.
    """
    with hardware.unobserved(), hardware.keep_random_state(found):
        # first, as access to peers takes memory too
        measured = measure_links(found, step, cache)
        hardware.release_cache()
        described = [
            _describe(
                device, found, limits.get(device), measured.ports.get(device), fragmented_bytes
            )
            for device in found
        ]
        links = evened(measured.links, {device.name: device.type for device in described})
        return Cluster(devices=tuple(described), links=tuple(links))


def resolve_limits(
    found: Sequence[torch.device], memory_bytes: MemoryLimit
) -> dict[torch.device, int]:
    """The limits that a user gave, by device.

    Raises:
        InputError: a limit is not positive, above the device's memory, or of another device.
    """
    if memory_bytes is None:
        return {}
    if isinstance(memory_bytes, Mapping):
        limits = {hardware.parse(device): limit for device, limit in memory_bytes.items()}
    else:
        limits = dict.fromkeys(found, memory_bytes)
    for device, limit in limits.items():
        if device not in found:
            raise InputError(
                f"memory_bytes names {device}, which is none of {', '.join(map(str, found))}"
            )
        if not isinstance(limit, int) or limit <= 0:
            raise InputError(
                f"memory_bytes of {device} is {limit!r}; give a positive whole number of bytes"
            )
        total = hardware.memory_bytes(device)[1]
        if device.type == "cuda" and limit > total:
            raise InputError(
                f"memory_bytes of {device} is {limit}, but the device has {total} bytes"
            )
    return limits


def _describe(
    device: torch.device,
    found: Sequence[torch.device],
    limit: int | None,
    ports: Ports | None,
    fragmented_bytes: Mapping[str, int],
) -> Device:
    total = hardware.memory_bytes(device)[1]
    if device.type == hardware.CPU:
        total //= sum(other.type == hardware.CPU for other in found)
        reserve = 0
    else:
        fragments = fragmented_bytes.get(hardware.type_name(device), 0)
        reserve = min(
            total, hardware.library_bytes(device) + hardware.context_bytes(device) + fragments
        )
    memory = total if limit is None else limit
    # A limit is what the placement may use, as long as the reserve fits beside it.
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
