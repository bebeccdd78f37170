"""What limits a placement, and what would help: found by solving changed requests, not by rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic

from placer.schema import (
    Cluster,
    Improvement,
    Limiting,
    Limits,
    Objective,
    Placement,
    PlacementRequest,
)
from placer.schema.base import LARGEST_BYTES
from placer.utils.units import bytes_text, count_text

Solve = Callable[[PlacementRequest], Placement]

MORE_MEMORY = 0.25
"""Increase of a device's memory, as a part of its limit: about the next larger card."""

FASTER = 2.0
"""Factor of a device's or a link's speed."""
LONGER = 1.1
"""Factor of a required bottleneck."""

LEAST_S = 1.0
"""Seconds that a changed request may take, however quickly the request itself was answered."""
TIMES_LONGER = 10.0
"""Factor of the request's own time that a changed request may take, if that is longer.

Some changes make a problem that is never proven, such as stages that need not be contiguous. They
would use all of the time limit after an answer that took a moment."""

WORTH = 0.005
"""Relative gain below which a change is not reported: it would be shown as 1.00x."""

UNLIMITED = "memory without limits"


def limits_of(
    request: PlacementRequest, placement: Placement, solve: Solve, time_left_s: float
) -> Limits:
    """Return what limits a placement, and what would help most.

    Args:
        request: the question.
        placement: its answer, with layers.
        solve: answers a changed question.
        time_left_s: for all of them together; those for which none is left are not asked.
    """
    until = monotonic() + time_left_s
    most_s = max(LEAST_S, TIMES_LONGER * placement.solve_time_s)
    changes = [*_changes(request, placement)]
    values: dict[str, float] = {}
    for number, (words, changed) in enumerate(changes):
        left_s = min((until - monotonic()) / (len(changes) - number), most_s)
        if left_s > 0.01:
            question = changed.model_copy(
                update={"explain": False, "break_ties": False, "time_limit_s": left_s}
            )
            value = solve(question).objective_value
            if value is not None:
                values[words] = value
    unlimited = values.pop(UNLIMITED, None)
    improvements = [_improvement(placement, words, value) for words, value in values.items()]
    worth = sorted(
        (help for help in improvements if help.speedup > 1 + WORTH), key=lambda help: -help.speedup
    )
    kind, detail = _named(request, placement, unlimited)
    return Limits(kind=kind, detail=detail, improvements=tuple(worth))


def _improvement(placement: Placement, words: str, value: float) -> Improvement:
    before = placement.objective_value or 0.0
    speedup = before / value if value > 0 else 1.0
    return Improvement(change=words, objective_value=value, speedup=speedup)


def _named(
    request: PlacementRequest, placement: Placement, unlimited: float | None
) -> tuple[Limiting, str]:
    """Return the kind of what limits, and its words.

    Memory, if the answer is better without its limits.
    """
    before = placement.objective_value or 0.0
    if unlimited is not None and unlimited < before * (1 - WORTH):
        better, now = (_value_text(request.objective, value) for value in (unlimited, before))
        return "memory", f"memory: without its limits {better} instead of {now}"
    if request.objective == "memory":
        return "memory", _fullest(placement)
    if request.objective == "devices":
        return _too_much_for_fewer(request, placement)
    busiest = next(load for load in placement.devices if load.bottleneck)
    transfers_ms = busiest.send_ms + busiest.receive_ms
    if transfers_ms > busiest.compute_ms:
        return "link", f"the links of {busiest.device}: {transfers_ms:.4g} ms of transfers"
    holder = _first_holder(placement, busiest.device)
    mine = [name for name, device in placement.layer_devices.items() if device == holder]
    if len(mine) == 1:
        return "layer", f"layer {mine[0]!r} on {busiest.device}: {busiest.compute_ms:.4g} ms alone"
    return (
        "compute",
        f"the work of {len(mine)} layers on {busiest.device}: {busiest.compute_ms:.4g} ms",
    )


def _first_holder(placement: Placement, device: str) -> str:
    """Return the device under which the map has the layers of a device or replica."""
    for first, members in placement.replicas.items():
        if device in (replica.device for replica in members):
            return first
    return device


def _fullest(placement: Placement) -> str:
    """Return the device that holds the most, and what most of it is."""
    load = max(placement.devices, key=lambda load: load.memory.total_bytes)
    sizes = load.memory.model_dump()
    kind = max(sizes, key=lambda name: sizes[name])
    what = kind.removesuffix("_bytes").replace("param", "parameter").replace("grad", "gradient")
    total, part = bytes_text(load.memory.total_bytes), bytes_text(sizes[kind])
    return f"{load.device} holds {total}, {part} of it for {what}s"


def _too_much_for_fewer(request: PlacementRequest, placement: Placement) -> tuple[Limiting, str]:
    """Return the larger of what all devices compute and transfer, which fewer do not do in time."""
    compute_ms = sum(load.compute_ms for load in placement.devices)
    transfers_ms = sum(load.send_ms + load.receive_ms for load in placement.devices)
    allowed = f"a device may be busy for {request.bottleneck_ms:.4g} ms"
    if transfers_ms > compute_ms:
        return "link", f"the links: {transfers_ms:.4g} ms of transfers in all; {allowed}"
    layers = count_text(len(placement.layer_devices), "layer")
    return "compute", f"the work of {layers}: {compute_ms:.4g} ms in all; {allowed}"


def _value_text(objective: Objective, value: float) -> str:
    if objective == "memory":
        return bytes_text(int(value))
    return f"{value:.4g}" + ("" if objective == "devices" else " ms")


def _changes(
    request: PlacementRequest, placement: Placement
) -> Iterator[tuple[str, PlacementRequest]]:
    """Yield every change to try, in words and as a request."""
    yield from _of_memory(request, placement)
    yield from _of_cluster(request)
    yield from _of_rules(request, placement)


def _of_memory(
    request: PlacementRequest, placement: Placement
) -> Iterator[tuple[str, PlacementRequest]]:
    """Yield requests without limits, with more memory where short, and with recomputation."""
    cluster = request.placed_on
    ample = tuple(
        device.model_copy(update={"memory_bytes": LARGEST_BYTES}) for device in cluster.devices
    )
    yield UNLIMITED, _with(request, cluster.model_copy(update={"devices": ample}))
    for number, load in enumerate(placement.devices):
        if load.memory.total_bytes > load.limit_bytes / 2:
            more = int(cluster.devices[number].memory_bytes * MORE_MEMORY)
            yield (
                f"{bytes_text(more)} more on {load.device}",
                _with(request, _roomier(cluster, number, more)),
            )
    if placement.training and request.constraints.recompute != "auto":
        yield "recompute allowed", _ruled(request, recompute="auto")


def _of_cluster(request: PlacementRequest) -> Iterator[tuple[str, PlacementRequest]]:
    """Return a device more, and faster links."""
    cluster, most = request.placed_on, request.constraints.max_devices
    if most is not None and most < len(cluster.devices):
        yield f"max_devices = {most + 1}", _ruled(request, max_devices=most + 1)
    elif most is None and request.objective != "devices":
        yield "one device more", _with(request, _one_more(cluster))
    if cluster.links:
        fast = tuple(
            link.model_copy(update={"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s * FASTER})
            for link in cluster.links
        )
        yield "links twice as fast", _with(request, cluster.model_copy(update={"links": fast}))


def _of_rules(
    request: PlacementRequest, placement: Placement
) -> Iterator[tuple[str, PlacementRequest]]:
    """Yield the request without each kind of rule, with a description."""
    rules = request.constraints
    if rules.pinned:
        yield "without pins", _ruled(request, pinned={})
    if rules.forbidden:
        yield "without forbidden devices", _ruled(request, forbidden={})
    if request.for_format is not None:
        yield (
            f"placements that {request.for_format} cannot express",
            request.model_copy(update={"for_format": None}),
        )
    elif placement.contiguous and _may_be_free(request):
        yield "stages that need not be contiguous", _ruled(request, contiguous=False)
    if request.bottleneck_ms is not None:
        longer_ms = request.bottleneck_ms * LONGER
        yield (
            f"bottleneck_ms = {longer_ms:.4g}",
            request.model_copy(update={"bottleneck_ms": longer_ms}),
        )


def _may_be_free(request: PlacementRequest) -> bool:
    """Return whether contiguity is a rule that can be left out.

    Under objective ``step``, where it was asked for.
    """
    if request.objective != "step":
        return True
    return (
        request.constraints.contiguous is True
        and request.is_training
        and request.schedule in ("auto", "interleaved")
    )


def _ruled(request: PlacementRequest, **rules: object) -> PlacementRequest:
    return request.model_copy(update={"constraints": request.constraints.model_copy(update=rules)})


def _with(request: PlacementRequest, cluster: Cluster) -> PlacementRequest:
    return request.model_copy(update={"cluster": cluster})


def _roomier(cluster: Cluster, number: int, more: int) -> Cluster:
    device = cluster.devices[number]
    roomy = device.model_copy(update={"memory_bytes": device.memory_bytes + more})
    return cluster.model_copy(
        update={"devices": (*cluster.devices[:number], roomy, *cluster.devices[number + 1 :])}
    )


def _one_more(cluster: Cluster) -> Cluster:
    """Return a copy of the last device with its links, and a link to it like its first one."""
    old = cluster.devices[-1]
    names = {device.name for device in cluster.devices}
    name = next(
        name for i in range(len(names) + 1) if (name := f"{old.name} copy {i}") not in names
    )
    links = list(cluster.links)
    for link in cluster.links:
        if old.name in (link.source, link.target):
            ends = {"source": link.source, "target": link.target}
            links.append(
                link.model_copy(
                    update={key: name if end == old.name else end for key, end in ends.items()}
                )
            )
    between = next((link for link in cluster.links if old.name in (link.source, link.target)), None)
    if between is not None:
        links.append(between.model_copy(update={"source": old.name, "target": name}))
        links.append(between.model_copy(update={"source": name, "target": old.name}))
    copy = old.model_copy(update={"name": name})
    return cluster.model_copy(update={"devices": (*cluster.devices, copy), "links": tuple(links)})
