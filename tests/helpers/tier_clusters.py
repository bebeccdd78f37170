"""Devices that read parameters from the host's memory, and from its disk."""

from __future__ import annotations

import itertools
from typing import Any

from placer.schema import Cluster, Device, Link, Rate


def cluster(
    count: int, memory_bytes: int, rate: float = 2e6, disk: float | None = None, **fields: Any
) -> Cluster:
    """Return devices of one type, with links between them.

    Args:
        count: of devices.
        memory_bytes: of each.
        rate: bytes that each reads from the host in a second.
        disk: bytes that each reads from the host's disk in a second; None without a disk.
        fields: further fields of each.
    """
    devices = tuple(
        Device(
            name=f"d{number}",
            type="t",
            memory_bytes=memory_bytes,
            from_host=Rate(bandwidth_bytes_per_s=rate, latency_s=1e-4),
            from_disk=Rate(bandwidth_bytes_per_s=disk, latency_s=3e-4) if disk else None,
            **fields,
        )
        for number in range(count)
    )
    links = tuple(
        Link(source=one.name, target=other.name, bandwidth_bytes_per_s=1e6, latency_s=2e-4)
        for one, other in itertools.permutations(devices, 2)
    )
    return Cluster(devices=devices, links=links)
