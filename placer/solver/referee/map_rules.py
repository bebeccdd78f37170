"""The rules of a map: constraints, links, stages that are contiguous and in pipeline order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from placer.schema import Constraints, Placement, PlacementRequest
from placer.solver.referee.claims import equal, require
from placer.solver.referee.loads import crossings, links_of

Where = Mapping[str, str]


def check_rules(request: PlacementRequest, where: Where, contiguous: bool) -> None:
    """Raise unless a map meets all constraints, its links exist, and its stages are contiguous."""
    rules = request.constraints
    equal("layers", list(where), [layer.name for layer in request.profile.layers])
    known = {device.name for device in request.devices}
    for layer, device in where.items():
        require(
            device in known,
            f"layer {layer!r} is on {device!r}, which is not a device of the cluster",
        )
    for layer, device in rules.pinned.items():
        require(
            where[layer] == device,
            f"layer {layer!r} is pinned to {device!r}, but is on {where[layer]!r}",
        )
    for name, banned in rules.forbidden.items():
        for layer in where if name == "*" else (name,):
            require(where[layer] not in banned, f"layer {layer!r} must not be on {where[layer]!r}")
    for group in (*request.profile.colocated, *rules.colocated):
        require(
            len({where[layer] for layer in group}) <= 1,
            f"colocated layers {group} are on several devices",
        )
    _check_numbers(rules, Counter(where.values()))
    _check_links(request, where)
    if contiguous:
        _check_contiguous(request, where)


def _check_numbers(rules: Constraints, used: Counter[str]) -> None:
    """Refuse numbers of devices, or of layers on a device, that break a rule."""
    check_used(rules, len(used))
    for device, held in used.items() if rules.max_layers is not None else ():
        require(
            held <= (rules.max_layers or 0),
            f"{device!r} holds {held} layers, {rules.max_layers} are allowed",
        )


def check_used(rules: Constraints, count: int) -> None:
    """Raise unless so many devices may be used."""
    least, most = rules.min_devices or 1, rules.max_devices or count
    require(least <= count <= most, f"{count} devices are used, {least} to {most} are allowed")


def _check_links(request: PlacementRequest, where: Where) -> None:
    links = links_of(request)
    for edge, source, target in crossings(request, where):
        require(
            (source, target) in links,
            f"the value of {edge.source!r} has no link from {source!r} to {target!r}",
        )
        if request.is_training and edge.gradient_bytes:
            require(
                (target, source) in links,
                f"the gradient of {edge.source!r} has no link back to {source!r}",
            )


def _check_contiguous(request: PlacementRequest, where: Where) -> None:
    """Take away devices that no other feeds until none is left.

    If some remain, they feed each other.
    """
    feeders: dict[str, set[str]] = {device: set() for device in where.values()}
    for _, source, target in crossings(request, where):
        feeders[target].add(source)
    left = set(feeders)
    while left:
        first = {device for device in left if left.isdisjoint(feeders[device])}
        require(
            bool(first), f"the stages are not contiguous: values go round between {sorted(left)}"
        )
        left -= first


def check_stages(request: PlacementRequest, where: Where, placement: Placement) -> None:
    """Raise unless the stages are the devices of the map, and in pipeline order if contiguous."""
    equal("stages", sorted(placement.stages), sorted(set(where.values())))
    if placement.contiguous:
        require(
            runs_forwards(request, where, placement.stages),
            f"stages {placement.stages} are not in pipeline order: a value runs backwards",
        )


def runs_forwards(request: PlacementRequest, where: Where, order: tuple[str, ...]) -> bool:
    """Return whether every value goes to a later device in this order."""
    place = {device: index for index, device in enumerate(order)}
    return all(place[source] < place[target] for _, source, target in crossings(request, where))
