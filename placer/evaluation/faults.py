"""Faults of maps: the requirements of a request that a map violates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import permutations

from placer.schema import DeviceLoad, Fault, FaultKind, PlacementRequest
from placer.schema.faults import clip
from placer.solver.problem import ROUNDING
from placer.solver.replicas.group_maps import Map, Replicas, maps_of_pipelines
from placer.utils.units import bytes_text, count_text

# Largest number of layers that a fault names; further ones are counted.
MAX_NAMED = 20


def name_faults(request: PlacementRequest, where: Map, replicas: Replicas) -> Iterator[Fault]:
    """Yield the layers without a device, and the unknown layers and devices."""
    layers = {layer.name for layer in request.profile.layers}
    devices = [device.name for device in request.devices]
    if missing := [layer.name for layer in request.profile.layers if layer.name not in where]:
        have = "has" if len(missing) == 1 else "have"
        yield _fault("layer-missing", missing, (), f"{_listed(missing)} {have} no device")
    if unknown := [name for name in where if name not in layers]:
        yield _fault(
            "layer-unknown", unknown, (), f"{_listed(unknown)}: the profile has no such layer"
        )
    unknown_devices = defaultdict(list)
    for layer, device in where.items():
        for name in [one.device for one in replicas.get(device, ())] or [device]:
            if name not in devices:
                unknown_devices[name].append(layer)
    for device, held in list(unknown_devices.items())[:MAX_NAMED]:
        detail = (
            f"{clip(device, 80)!r} is not a device of the cluster, which has {_listed(devices)}"
        )
        yield _fault("device-unknown", held, (device,), detail)


def constraint_faults(request: PlacementRequest, where: Map) -> Iterator[Fault]:
    """Yield the violated constraints: pins, bans, groups and numbers."""
    yield from device_faults(request, where)
    yield from _group_faults(request, where)
    yield from device_count_faults(request, set(where.values()))
    yield from _layer_count_faults(request, where)


def device_faults(request: PlacementRequest, where: Map) -> Iterator[Fault]:
    """Yield the layers on a device that is not theirs: pins and bans."""
    rules = request.constraints
    for layer, device in rules.pinned.items():
        if where[layer] != device:
            detail = f"layer {layer!r} is pinned to {device!r}, but is on {where[layer]!r}"
            yield _fault("pin-broken", (layer,), (device, where[layer]), detail)
    everywhere = rules.forbidden.get("*", ())
    for layer, device in where.items():
        if device in everywhere or device in rules.forbidden.get(layer, ()):
            detail = f"layer {layer!r} must not be on {device!r}"
            yield _fault("device-forbidden", (layer,), (device,), detail)


def _group_faults(request: PlacementRequest, where: Map) -> Iterator[Fault]:
    for group in (*request.profile.colocated, *request.constraints.colocated):
        apart = sorted({where[layer] for layer in group})
        if len(apart) > 1:
            detail = f"{_listed(group)} must share a device, but are on {_listed(apart)}"
            yield _fault("colocation-broken", group, apart, detail)


def device_count_faults(request: PlacementRequest, devices: Collection[str]) -> Iterator[Fault]:
    """Yield the violated limits on the number of devices."""
    rules, used = request.constraints, sorted(devices)
    if rules.max_devices is not None and len(used) > rules.max_devices:
        detail = f"it uses {count_text(len(used), 'device')}; max_devices is {rules.max_devices}"
        yield _fault("too-many-devices", (), used, detail)
    if rules.min_devices is not None and len(used) < rules.min_devices:
        detail = f"it uses {count_text(len(used), 'device')}; min_devices is {rules.min_devices}"
        yield _fault("too-few-devices", (), used, detail)


def _layer_count_faults(request: PlacementRequest, where: Map) -> Iterator[Fault]:
    rules = request.constraints
    for device, count in Counter(where.values()).items():
        if rules.max_layers is not None and count > rules.max_layers:
            detail = (
                f"{device!r} holds {count_text(count, 'layer')}; max_layers is {rules.max_layers}"
            )
            held = [layer for layer, other in where.items() if other == device]
            yield _fault("too-many-layers", held, (device,), detail)


def time_faults(request: PlacementRequest, loads: Sequence[DeviceLoad]) -> Iterator[Fault]:
    """Yield the devices that are busy for longer than ``bottleneck_ms``."""
    for load in loads if request.bottleneck_ms is not None else ():
        if load.load_ms > (request.bottleneck_ms or 0.0) * (1 + ROUNDING):
            detail = (
                f"{load.device!r} is busy for {load.load_ms:.6g} ms; {request.bottleneck_ms:g} ms"
                " are allowed"
            )
            yield _fault("too-slow", (), (load.device,), detail)


def link_faults(request: PlacementRequest, where: Map) -> Iterator[Fault]:
    """Yield the missing links that values or gradients need."""
    links = {(link.source, link.target) for link in request.placed_on.links}
    broken: dict[tuple[str, str], list[str]] = defaultdict(list)
    for edge in request.profile.edges:
        for target in {where[name] for name in edge.targets} - {where[edge.source]}:
            back = request.is_training and edge.gradient_bytes > 0
            for way in [
                (where[edge.source], target),
                *([(target, where[edge.source])] if back else []),
            ]:
                if way not in links:
                    broken[way].append(edge.source)
    for (source, target), values in broken.items():
        detail = (
            f"there is no link from {source!r} to {target!r}, which the values of"
            f" {_listed(values)} need"
        )
        yield _fault("link-missing", values, (source, target), detail)


def exchange_faults(request: PlacementRequest, replicas: Replicas) -> Iterator[Fault]:
    """Yield the missing links between replicas of a stage, which exchange gradients."""
    links = {(link.source, link.target) for link in request.placed_on.links}
    for members in replicas.values():
        for source, target in permutations([one.device for one in members], 2):
            if (source, target) not in links:
                detail = (
                    f"there is no link from {source!r} to {target!r}, which the gradients of their"
                    " replicas need"
                )
                yield _fault("link-missing", (), (source, target), detail)


def faults_of_all(request: PlacementRequest, where: Map, replicas: Replicas) -> list[Fault]:
    """Return the violated requirements that are about all pipelines together."""
    maps = maps_of_pipelines(where, replicas)
    found = [
        *device_count_faults(request, {device for own in maps for device in own.values()}),
        *(fault for own in maps for fault in device_faults(request, own)),
        *exchange_faults(request, replicas),
    ]
    # pipelines may share devices
    return list(dict.fromkeys(found))


def not_contiguous(request: PlacementRequest, where: Map, remedy: str) -> Fault:
    """Return the fault of stages that form a cycle.

    Removing devices without an input, and then devices without an output, leaves the cycle. The
    remedy says what the user can do, and what the cost assumes.
    """
    feeds = {
        (where[edge.source], where[target])
        for edge in request.profile.edges
        for target in edge.targets
        if where[edge.source] != where[target]
    }
    left = set(where.values())
    while first := {
        device for device in left if not any((other, device) in feeds for other in left)
    }:
        left -= first
    while last := {
        device for device in left if not any((device, other) in feeds for other in left)
    }:
        left -= last
    detail = (
        f"the stages are not contiguous: values form a cycle between {_listed(sorted(left))}."
        f" {remedy}"
    )
    return _fault("not-contiguous", (), sorted(left), detail)


def memory_faults(loads: Iterable[DeviceLoad]) -> Iterator[Fault]:
    """Yield the devices that need more memory than they may use, with the missing bytes."""
    for load in loads:
        short = load.memory.total_bytes - load.limit_bytes
        if short > 0:
            detail = (
                f"{load.device!r} needs {bytes_text(load.memory.total_bytes)}, but may use"
                f" {bytes_text(load.limit_bytes)}: {bytes_text(short)} are missing"
            )
            yield _fault("out-of-memory", (), (load.device,), detail, short)


def _fault(
    kind: FaultKind,
    layers: Sequence[str],
    devices: Sequence[str],
    detail: str,
    missing_bytes: int = 0,
) -> Fault:
    return Fault(
        kind=kind,
        detail=detail,
        layers=tuple(layers[:MAX_NAMED]),
        devices=tuple(devices),
        missing_bytes=missing_bytes,
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(clip(name, 80)) for name in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
