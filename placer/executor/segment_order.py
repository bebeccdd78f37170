"""The layers of each device together, where that can be: a device is then one stage, as the solver
reckons it.

    layers on devices 0 to 3, in execution order      0 | 1 | 2 | 1 | 2 | 3       two branches, in turn
    the same, stage by stage                          0 | 1   1 | 2   2 | 3

A schedule such as 1F1B needs one stage a device; segments that only interleave would otherwise be
run as fill-drain.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import torch

from placer.capture.layers import LayerGraph

Arcs = set[tuple[int, int]]


def stage_by_stage(
    graph: LayerGraph, places: Sequence[torch.device]
) -> tuple[LayerGraph, list[torch.device]]:
    """A layer graph with the layers of each device one after another, and their devices.

    Where values, or state that layers change, go from a device to another and back, it stays as it
    is.

    Args:
        graph: the layers, in execution order.
        places: the device of each.
    """
    used = list(dict.fromkeys(places))
    number = [used.index(place) for place in places]
    arcs = {(number[a], number[b]) for a, b in _needs(graph) if number[a] != number[b]}
    order = _topological(len(used), arcs)
    if order is None:
        return graph, list(places)
    rank = {device: position for position, device in enumerate(order)}
    # stable: in execution order there
    layers = sorted(range(len(places)), key=lambda layer: rank[number[layer]])
    return replace(graph, layers=[graph.layers[layer] for layer in layers]), [
        places[layer] for layer in layers
    ]


def _needs(graph: LayerGraph) -> Arcs:
    """Pairs of layers, the second of which must run after the first: it reads what that made,
    changed or reads.
    """
    made: dict[str, int] = {}
    users: dict[str, list[int]] = {}
    changed = {name for layer in graph.layers for name in layer.mutated}
    arcs: Arcs = set()
    for index, layer in enumerate(graph.layers):
        arcs |= {(made[name], index) for name in layer.reads if name in made}
        for name in changed.intersection(layer.state):
            arcs |= {(user, index) for user in users.get(name, ())}
            users.setdefault(name, []).append(index)
        made.update(dict.fromkeys(layer.writes, index))
    return arcs


def _topological(count: int, arcs: Arcs) -> list[int] | None:
    """The devices so that all arcs run forwards, by their first layers otherwise; None if they go
    round.
    """
    waiting = [sum(target == device for _, target in arcs) for device in range(count)]
    ready = [device for device in range(count) if not waiting[device]]
    order: list[int] = []
    while ready:
        device = heapq.heappop(ready)
        order.append(device)
        for source, target in arcs:
            if source == device:
                waiting[target] -= 1
                if not waiting[target]:
                    heapq.heappush(ready, target)
    return order if len(order) == count else None
