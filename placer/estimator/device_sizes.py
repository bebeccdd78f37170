"""Devices that exist only as sizes of memory, from text or from a list.

2x24GiB           two devices of 24 GiB
24GiB,12GiB       one of each
2x80GB,1x24GiB    decimal units, as in other sizes
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from placer.errors import InputError, kind_of
from placer.schema import Cluster, Device, Link
from placer.schema.base import LARGEST_BYTES, MAX_DEVICES
from placer.utils.units import bytes_text, parse_bytes

DEVICE_TYPE = "device"
"""Type of devices that are known by their size only."""

_BYTES_PER_S = 1e9
"""Bandwidth of links between such devices; no memory depends on it."""

_COUNTED = re.compile(r"\s*(?:([0-9]+)\s*[x*]\s*)?(.*?)\s*")


def cluster_of(devices: Any, reserve_bytes: int) -> Cluster:
    """Return the devices that a caller describes.

    Args:
        devices: text such as ``2x24GiB,12GiB``, a list of sizes in bytes or as text, or a Cluster,
            which is returned unchanged.
        reserve_bytes: the part of each device that the model cannot use.

    Raises:
        InputError: this describes no devices, or a device is smaller than its reserve.
    """
    if isinstance(devices, Cluster):
        return devices
    if isinstance(devices, str):
        return sized_cluster(_sizes(devices), reserve_bytes)
    if isinstance(devices, Sequence) and devices:
        return sized_cluster([_size(one) for one in devices], reserve_bytes)
    raise InputError(
        f"devices is {kind_of(devices) if devices else 'empty'}; give text such as '2x24GiB' or"
        " '24GiB,12GiB', a list of sizes in bytes, or a placer.Cluster"
    )


def sized_cluster(sizes_bytes: Sequence[int], reserve_bytes: int) -> Cluster:
    """Return devices of these sizes, each linked with every other.

    Raises:
        InputError: a device is smaller than its reserve, or there are too many.
    """
    if len(sizes_bytes) > MAX_DEVICES:
        raise InputError(f"{len(sizes_bytes)} devices are given; the limit is {MAX_DEVICES}")
    for size in sizes_bytes:
        if size <= reserve_bytes:
            raise InputError(
                f"a device of {bytes_text(size)} is not larger than the reserve of"
                f" {bytes_text(reserve_bytes)}, which no model can use; give a larger device, with"
                " its unit as in 24GiB, or a smaller reserve_bytes"
            )
    devices = tuple(
        Device(
            name=f"cuda:{number}",
            type=DEVICE_TYPE,
            memory_bytes=size,
            reserve_bytes=reserve_bytes,
        )
        for number, size in enumerate(sizes_bytes)
    )
    return Cluster(devices=devices, links=_links([device.name for device in devices]))


def with_sizes(cluster: Cluster, usable_bytes: Sequence[int]) -> Cluster:
    """Return the cluster with other limits, of which the model may use everything.

    Args:
        cluster: the devices.
        usable_bytes: by device, in the cluster's order.
    """
    devices = tuple(
        device.model_copy(update={"memory_bytes": usable + device.reserve_bytes})
        for device, usable in zip(cluster.devices, usable_bytes, strict=True)
    )
    return cluster.model_copy(update={"devices": devices})


def with_more(cluster: Cluster, count: int) -> Cluster:
    """Return the cluster with further copies of its largest device, linked with every device."""
    largest = max(cluster.devices, key=lambda device: device.usable_bytes)
    names = {device.name for device in cluster.devices}
    free = (name for number in range(2 * MAX_DEVICES) if (name := f"cuda:{number}") not in names)
    more = tuple(largest.model_copy(update={"name": next(free)}) for _ in range(count))
    devices = (*cluster.devices, *more)
    links = {(link.source, link.target): link for link in cluster.links}
    added = {device.name for device in more}
    new = _links([device.name for device in devices])
    joined = [link for link in new if added & {link.source, link.target}]
    return cluster.model_copy(update={"devices": devices, "links": (*links.values(), *joined)})


def untyped(cluster: Cluster) -> Cluster:
    """Return the cluster with the one type of devices that are known by their size."""
    devices = tuple(device.model_copy(update={"type": DEVICE_TYPE}) for device in cluster.devices)
    return cluster.model_copy(update={"devices": devices})


def largest_devices(cluster: Cluster) -> list[int]:
    """Return the numbers of the devices with the most memory."""
    usable = [device.usable_bytes for device in cluster.devices]
    return [number for number, size in enumerate(usable) if size == max(usable)]


def grown(cluster: Cluster, numbers: Sequence[int]) -> Cluster:
    """Return the cluster with unlimited memory of some devices."""
    usable = [device.usable_bytes for device in cluster.devices]
    for number in numbers:
        usable[number] = LARGEST_BYTES - cluster.devices[number].reserve_bytes
    return with_sizes(cluster, usable)


def _sizes(text: str) -> list[int]:
    """Return the sizes in bytes that a text names.

    Raises:
        InputError: a part of it is no size.
    """
    if text.strip().isdecimal() and int(text) <= MAX_DEVICES:
        raise InputError(
            f"devices is {text!r}, which is a number of devices without their size, or a size"
            " without its unit; write 2x24GiB or 24GiB,12GiB"
        )
    sizes: list[int] = []
    for part in text.split(","):
        match = _COUNTED.fullmatch(part)
        count = int(match[1] or 1) if match is not None else 0
        if match is None or not match[2] or not 1 <= count <= MAX_DEVICES:
            raise InputError(
                f"devices {text!r}: {part!r} is not COUNTxSIZE or SIZE; write 4x24GiB or"
                " 24GiB,12GiB"
            )
        sizes += [_size(match[2])] * count
    return sizes


def _size(given: Any) -> int:
    size = parse_bytes(given) if isinstance(given, str) else given
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= 2**50:
        raise InputError(
            f"a device of {given!r} bytes; give between 1 byte and 1 PiB, as in 24GiB or 24 * 2**30"
        )
    return size


def _links(names: Sequence[str]) -> tuple[Link, ...]:
    return tuple(
        Link(source=source, target=target, bandwidth_bytes_per_s=_BYTES_PER_S)
        for source in names
        for target in names
        if source != target
    )
