"""The referee's own computation of latency, as in the docstring of ``pass_times.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from graphlib import TopologicalSorter
from itertools import pairwise
from types import MappingProxyType

from placer.schema import PlacementRequest
from placer.solver.referee import tiers

Where = Mapping[str, str]

COPY = "copy of "
"""The beginning of the name of the copy of a layer's parameters, as an event."""

CHOSEN = "chosen experts of "
"""The same for the copy of the experts that a layer's tokens choose."""


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
    copies: Mapping[str, tiers.CopyTimes] | None = None,
) -> float:
    """Return the longest path through layers and copies; every event waits for others."""
    copies = copies or {}
    takes = {name: time(name) for name in names}
    waits: dict[str, list[tuple[str, float]]] = {name: [] for name in names}
    for before, after, delay in arrows:
        waits[after].append((before, delay))
    latest: dict[str, str] = {}
    for name in names:
        if where[name] in latest:
            waits[name].append((latest[where[name]], 0.0))
        latest[where[name]] = name
    for name, own in copies.items():
        takes[f"{COPY}{name}"], waits[f"{COPY}{name}"] = own.ahead, []
        waits[name].append((f"{COPY}{name}", 0.0))
        if own.chosen is not None:
            # the chosen experts come when the layer has begun, and it goes on when they are there
            takes[f"{CHOSEN}{name}"], waits[f"{CHOSEN}{name}"] = own.chosen, [*waits[name]]
            waits[name].append((f"{CHOSEN}{name}", 0.0))
    for before, after in _order_of_copies(names, where, copies):
        waits[after].append((before, 0.0))
    done: dict[str, float] = {}
    graph = {event: [before for before, _ in own] for event, own in waits.items()}
    for event in TopologicalSorter(graph).static_order():
        begun = max((done[before] + delay for before, delay in waits[event]), default=0.0)
        done[event] = begun + takes[event]
    return max(done[name] for name in names)


def _order_of_copies(
    names: list[str], where: Where, copies: Mapping[str, tiers.CopyTimes]
) -> list[tuple[str, str]]:
    """Return which event each copy waits for: two buffers, filled in turn, over one link."""
    found: list[tuple[str, str]] = []
    for device in set(where.values()):
        streamed = [name for name in names if name in copies and where[name] == device]
        on_link = [f"{COPY}{name}" for name in streamed[:1]]
        for place, name in enumerate(streamed):
            on_link += [f"{COPY}{later}" for later in streamed[place + 1 : place + 2]]
            on_link += [f"{CHOSEN}{name}"] if copies[name].chosen is not None else []
        found += pairwise(on_link)
        found += [
            (first, f"{COPY}{name}") for first, name in zip(streamed, streamed[2:], strict=False)
        ]
    return found
