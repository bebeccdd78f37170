"""Reordering of layers such that each device is one stage, as the solver assumes.

    layers on devices 0 to 3, in execution order      0 | 1 | 2 | 1 | 2 | 3       two branches
    the same layers, stage by stage                   0 | 1   1 | 2   2 | 3

Schedules such as 1F1B need one stage per device; interleaved segments would otherwise run as
fill-drain.
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
    """Return the layer graph with each device's layers consecutive, and their devices.

    The order stays if values, or state that layers change, go from a device to another and back.

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
    # a stable sort keeps the execution order within a device
    layers = sorted(range(len(places)), key=lambda layer: rank[number[layer]])
    return replace(graph, layers=[graph.layers[layer] for layer in layers]), [
        places[layer] for layer in layers
    ]


def _needs(graph: LayerGraph) -> Arcs:
    """Return pairs of layers whose order must stay.

    The second one reads values of the first, or both use state that some layer changes.
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
    """Return a topological order of the devices, by first layer; None for a cycle."""
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
