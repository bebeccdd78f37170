"""The referee's own computation of latency, as in the docstring of ``costs.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from placer.schema import PlacementRequest
from placer.solver.referee import tiers

Where = Mapping[str, str]

COPY = "copy of "
"""The beginning of the name of the copy of a layer's parameters, as an event."""


def latency_ms(
    request: PlacementRequest, where: Where, resting: tiers.Resting = MappingProxyType({})
) -> float:
    """Return the time of one micro-batch through the model, in training also backwards.

    Args:
        request: the question.
        where: by layer, its device.
        resting: where the parameters of layers rest; nowhere in training.
    """
    links = {(link.source, link.target): link for link in request.placed_on.links}
    kinds = {device.name: device.type for device in request.devices}
    names = [layer.name for layer in request.profile.layers]
    layers = {layer.name: layer for layer in request.profile.layers}

    def delay_ms(source: str, target: str, size_bytes: int, repeats: int = 1) -> float:
        if source == target or not repeats:
            return 0.0
        return repeats * links[source, target].transfer_ms(size_bytes)

    arrows = [
        (e.source, t, delay_ms(where[e.source], where[t], e.bytes, e.repeats))
        for e in request.profile.edges
        for t in e.targets
    ]
    total = _last_finish(
        names,
        where,
        arrows,
        lambda name: layers[name].forward_ms[kinds[where[name]]],
        tiers.copy_times(request, where, resting),
    )
    if request.is_training:
        arrows = [
            (t, e.source, delay_ms(where[t], where[e.source], e.gradient_bytes))
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
    copies: Mapping[str, float] | None = None,
) -> float:
    copies = copies or {}
    waits: dict[str, list[tuple[str, float]]] = {
        event: [] for name in names for event in (name, f"{COPY}{name}")
    }
    for before, after, delay in (*arrows, *_order_of_copies(names, where, copies)):
        waits[after].append((before, delay))
    done: dict[str, float] = {}
    busy_until: dict[str, float] = {}
    for name in names:
        if name in copies:
            copy = f"{COPY}{name}"
            done[copy] = max([0.0, *(done[before] for before, _ in waits[copy])]) + copies[name]
        ready = busy_until.get(where[name], 0.0)
        for before, delay in waits[name]:
            ready = max(ready, done[before] + delay)
        done[name] = busy_until[where[name]] = ready + time(name)
    return max(done.values())


def _order_of_copies(
    names: list[str], where: Where, copies: Mapping[str, float]
) -> list[tuple[str, str, float]]:
    """Return what copies wait for, and what waits for them: two buffers, filled in turn."""
    found: list[tuple[str, str, float]] = []
    for device in set(where.values()):
        streamed = [name for name in names if name in copies and where[name] == device]
        for place, name in enumerate(streamed):
            found.append((f"{COPY}{name}", name, 0.0))
            if place > 0:
                found.append((f"{COPY}{streamed[place - 1]}", f"{COPY}{name}", 0.0))
            if place > 1:
                found.append((streamed[place - 2], f"{COPY}{name}", 0.0))
    return found
