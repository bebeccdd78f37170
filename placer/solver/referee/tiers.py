"""The referee's own rules of parameters that rest on the host, as ``costs.py`` describes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from placer.errors import PlacementError
from placer.schema import Placement, PlacementRequest
from placer.schema.base import MERGED, WHOLE
from placer.solver.referee.claims import equal, near, require

Where = Mapping[str, str]


def copy_times(
    request: PlacementRequest, where: Where, resting: Collection[str]
) -> dict[str, float]:
    """Return, by layer whose parameters rest, the time to copy them to its device, in ms."""
    rates = {device.name: device.from_host for device in request.devices}
    found: dict[str, float] = {}
    for layer in request.profile.layers:
        if layer.name not in resting:
            continue
        rate = rates[where[layer.name]]
        if rate is None:
            raise PlacementError(
                f"parameters of {layer.name!r} rest on the host, but {where[layer.name]!r} has no "
                "measured rate from there"
            )
        seconds = rate.latency_s + layer.param_bytes / rate.bandwidth_bytes_per_s
        found[layer.name] = 1000.0 * seconds
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
    """Raise unless parameters rest only where they may, within the host memory of each host."""
    limit, where = request.host_memory_bytes, placement.layer_devices
    sizes = _sizes(request, where, placement)
    times = copy_times(request, where, placement.resting)
    for load in placement.devices:
        equal(f"resting_bytes of {load.device}", load.resting_bytes, sum(sizes[load.device]))
        copying = sum(time_ms for name, time_ms in times.items() if where[name] == load.device)
        near(f"streaming_ms of {load.device}", load.streaming_ms, copying)
    if not placement.resting:
        return
    if limit is None:
        raise PlacementError("parameters rest on the host, which was not asked for")
    by_host: defaultdict[str, int] = defaultdict(int)
    for device in request.devices:
        by_host[device.host] += sum(sizes[device.name])
    for host, taken in by_host.items():
        require(taken <= limit, f"{taken} bytes rest on host {host!r}; the limit is {limit}")
    names = [layer.name for layer in request.profile.layers]
    tied = {name for tie in request.profile.tied for name in tie.layers}
    for name in placement.resting:
        alike = [other for other in names if not _modules(other).isdisjoint(_modules(name))]
        require(
            name != WHOLE and name not in tied and alike == [name],
            f"parameters of {name!r} rest on the host, but other layers use them",
        )


def _modules(name: str) -> set[str]:
    """Return the paths of the modules of a layer, whichever of their calls it is."""
    return {path.split("@")[0] for path in name.split(MERGED)}
