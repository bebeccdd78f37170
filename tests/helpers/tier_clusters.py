"""Devices that read parameters from the host's memory, and from its disk; what passes take."""

from __future__ import annotations

import itertools
from typing import Any

from placer import PlacementRequest
from placer.schema import Cluster, Device, Layer, Link, Rate


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


def memory_bytes(asked: PlacementRequest, own: list[Layer], resting: dict[str, str]) -> int:
    """The bytes of a device with these layers: state, buffers for copies, and the worst moment."""
    state = sum(layer.buffer_bytes for layer in own)
    state += sum(layer.param_bytes for layer in own if layer.name not in resting)
    state += 2 * max((layer.param_bytes for layer in own if layer.name in resting), default=0)
    names = [layer.name for layer in asked.profile.layers]
    here = {layer.name: layer for layer in own}
    peak = 0
    for place, name in enumerate(names):
        live = 0
        for edge in asked.profile.edges:
            first = names.index(edge.source)
            readers = [reader for reader in edge.targets if reader in here]
            last = max(map(names.index, edge.targets if edge.source in here else readers or ["a"]))
            if (edge.source in here or readers) and first <= place <= last:
                live += edge.bytes
        work = here[name].forward_workspace_bytes if name in here else 0
        peak = max(peak, live + work)
    return state + peak


def pass_ms(asked: PlacementRequest, where: dict[str, str], resting: dict[str, str]) -> float:
    """The time of a pass: events of computing, sending and copying, each as early as it may be."""
    layers = {layer.name: layer for layer in asked.profile.layers}
    devices = {device.name: device for device in asked.devices}
    links = {(link.source, link.target): link for link in asked.placed_on.links}
    finish: dict[str, float] = {}
    copied: dict[str, float] = {}

    def earlier(name: str, among: set[str]) -> list[str]:
        return [one for one in among if one < name and where[one] == where[name]]

    for name in layers:
        starts = [finish[one] for one in earlier(name, set(layers))]
        for edge in asked.profile.edges:
            if name in edge.targets:
                ends = where[edge.source], where[name]
                delay = links[ends].transfer_ms(edge.bytes) if ends[0] != ends[1] else 0.0
                starts.append(finish[edge.source] + delay)
        if name in resting:
            rate, disk = devices[where[name]].from_host, devices[where[name]].from_disk
            assert rate is not None
            copies = sorted(earlier(name, set(resting)))
            begin = max(
                [copied[one] for one in copies[-1:]] + [finish[one] for one in copies[-2:-1]],
                default=0.0,
            )
            size = layers[name].param_bytes
            copy_s = rate.latency_s + size / rate.bandwidth_bytes_per_s
            if resting[name] == "disk":
                assert disk is not None
                slower = min(rate.bandwidth_bytes_per_s, disk.bandwidth_bytes_per_s)
                copy_s = rate.latency_s + disk.latency_s + size / slower
            copied[name] = begin + 1e3 * copy_s
            starts.append(copied[name])
        finish[name] = max(starts, default=0.0) + layers[name].forward_ms[devices[where[name]].type]
    return max(finish.values())
