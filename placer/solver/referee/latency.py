"""The referee's own computation of latency, as in the docstring of ``costs.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from placer.schema import Edge, PlacementRequest

Where = Mapping[str, str]


def latency_ms(request: PlacementRequest, where: Where) -> float:
    """Return the time of one micro-batch through the model, in training also backwards."""
    links = {(link.source, link.target): link for link in request.placed_on.links}
    kinds = {device.name: device.type for device in request.devices}
    names = [layer.name for layer in request.profile.layers]
    layers = {layer.name: layer for layer in request.profile.layers}

    def forward_delay(edge: Edge, source: str, target: str) -> float:
        return 0.0 if source == target else links[source, target].transfer_ms(edge.bytes)

    def backward_delay(edge: Edge, source: str, target: str) -> float:
        return 0.0 if source == target else links[target, source].transfer_ms(edge.gradient_bytes)

    arrows = [
        (e.source, t, forward_delay(e, where[e.source], where[t]))
        for e in request.profile.edges
        for t in e.targets
    ]
    total = _last_finish(
        names, where, arrows, lambda name: layers[name].forward_ms[kinds[where[name]]]
    )
    if request.is_training:
        arrows = [
            (t, e.source, backward_delay(e, where[e.source], where[t]))
            for e in request.profile.edges
            for t in e.targets
            if e.gradient_bytes
        ]
        total += _last_finish(
            names[::-1], where, arrows, lambda name: layers[name].backward_ms[kinds[where[name]]]
        )
    return total


def _last_finish(
    names: list[str],
    where: Where,
    arrows: list[tuple[str, str, float]],
    time: Callable[[str], float],
) -> float:
    waits: dict[str, list[tuple[str, float]]] = {name: [] for name in names}
    for before, after, delay in arrows:
        waits[after].append((before, delay))
    done: dict[str, float] = {}
    busy_until: dict[str, float] = {}
    for name in names:
        ready = busy_until.get(where[name], 0.0)
        for before, delay in waits[name]:
            ready = max(ready, done[before] + delay)
        done[name] = busy_until[where[name]] = ready + time(name)
    return max(done.values())
