"""The referee's own rules of resting parameters, as ``pass_times.py`` describes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from placer.errors import PlacementError
from placer.schema import Placement, PlacementRequest
from placer.schema.base import WHOLE, Tier, copies_chosen_experts, module_paths
from placer.solver.referee.claims import equal, near, require

Where = Mapping[str, str]
Resting = Mapping[str, Tier]


class CopyTimes(NamedTuple):
    """The times of a layer's copies, in ms.

    Attributes:
        ahead: before it runs.
        chosen: of the experts that its tokens choose, while it runs; None if none are copied so.
    """

    ahead: float
    chosen: float | None


def copy_times(request: PlacementRequest, where: Where, resting: Resting) -> dict[str, CopyTimes]:
    """Return the times to copy parameters to their device, by layer whose parameters rest."""
    devices = {device.name: device for device in request.devices}
    layers = [layer for layer in request.profile.layers if layer.name in resting]
    by_choice = copies_chosen_experts(sum(layer.expert_bytes for layer in layers))
    found: dict[str, CopyTimes] = {}
    for layer in layers:
        device = devices[where[layer.name]]
        legs = {"from_host": device.from_host}
        if resting[layer.name] == "disk":
            legs["from_disk"] = device.from_disk
        seconds, per_byte = 0.0, 0.0
        for name, rate in legs.items():
            if rate is None:
                raise PlacementError(
                    f"parameters of {layer.name!r} rest on the {resting[layer.name]}, but "
                    f"{device.name!r} has no measured rate from there ({name})"
                )
            seconds += rate.latency_s
            # the legs run at the same time, so the slower one counts
            per_byte = max(per_byte, 1.0 / rate.bandwidth_bytes_per_s)
        whole, chosen = layer.param_bytes, None
        if by_choice and layer.expert_bytes > 0:
            whole -= layer.expert_bytes
            chosen = 1000.0 * (seconds + layer.expert_bytes * layer.expert_share * per_byte)
        found[layer.name] = CopyTimes(1000.0 * (seconds + whole * per_byte), chosen)
    return found


def saved_bytes(request: PlacementRequest, where: Where, placement: Placement) -> dict[str, int]:
    """Return, by device, the bytes of resting parameters beyond the two buffers for them.

    It is negative where the buffers take more.
    """
    sizes = _sizes(request, where, placement)
    return {device: sum(own) - 2 * max(own, default=0) for device, own in sizes.items()}


def _sizes(
    request: PlacementRequest, where: Where, placement: Placement
) -> defaultdict[str, list[int]]:
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for layer in request.profile.layers:
        if layer.name in placement.resting:
            sizes[where[layer.name]].append(layer.param_bytes)
    return sizes


def check_resting(request: PlacementRequest, placement: Placement) -> None:
    """Raise unless parameters rest only where they may, within the limits of each host."""
    _check_loads(request, placement)
    if placement.resting:
        _check_hosts(request, placement)
        _check_layers(request, placement)


def _check_loads(request: PlacementRequest, placement: Placement) -> None:
    """Raise unless each device reports what it copies."""
    where = placement.layer_devices
    sizes = _sizes(request, where, placement)
    times = copy_times(request, where, placement.resting)
    for load in placement.devices:
        equal(f"resting_bytes of {load.device}", load.resting_bytes, sum(sizes[load.device]))
        on_disk = sum(
            layer.param_bytes
            for layer in request.profile.layers
            if placement.resting.get(layer.name) == "disk" and where[layer.name] == load.device
        )
        equal(f"disk_bytes of {load.device}", load.disk_bytes, on_disk)
        mine = [time for name, time in times.items() if where[name] == load.device]
        copying = sum(time.ahead + (time.chosen or 0.0) for time in mine)
        near(f"streaming_ms of {load.device}", load.streaming_ms, copying)


def _check_hosts(request: PlacementRequest, placement: Placement) -> None:
    """Raise unless the parameters that rest on each host are within its limits.

    Where the CPU of a host is a device, too, they share its memory with the layers there.
    """
    hosts = {device.name: device.host for device in request.devices}
    taken: defaultdict[tuple[str, str], int] = defaultdict(int)
    for layer in request.profile.layers:
        if layer.name in placement.resting:
            host = hosts[placement.layer_devices[layer.name]]
            taken[host, placement.resting[layer.name]] += layer.param_bytes
    limits = {"host": request.host_memory_bytes, "disk": request.disk_bytes}
    for (host, tier), size in taken.items():
        limit = limits[tier]
        if limit is None:
            raise PlacementError(f"parameters rest on the {tier}, which was not asked for")
        at = "on host" if tier == "host" else "on the disk of host"
        require(size <= limit, f"{size} bytes rest {at} {host!r}; the limit is {limit}")
    used = {load.device: load.memory.total_bytes for load in placement.devices}
    for host in {host for host, tier in taken if tier == "host"}:
        cpus = [one for one in request.devices if one.host == host and one.is_host]
        needed = taken[host, "host"] + sum(used[one.name] for one in cpus)
        memory = sum(one.memory_bytes - one.reserve_bytes for one in cpus)
        require(
            not cpus or needed <= memory,
            f"{needed} bytes rest on host {host!r} or belong to layers on its CPU, which may take"
            f" {memory}",
        )


def _check_layers(request: PlacementRequest, placement: Placement) -> None:
    """Raise unless parameters that rest belong to one layer alone."""
    names = [layer.name for layer in request.profile.layers]
    tied = {name for tie in request.profile.tied for name in tie.layers}
    for name in placement.resting:
        own = set(module_paths(name))
        alike = [other for other in names if not own.isdisjoint(module_paths(other))]
        require(
            name != WHOLE and name not in tied and alike == [name],
            f"parameters of {name!r} rest off its device, but other layers use them",
        )
