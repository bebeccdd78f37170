"""Reductions that lose nothing: what must be on one device is decided once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from placer.solver.components import group_of, strong_components
from placer.solver.problem import Problem, arcs_of


@dataclass(frozen=True)
class Reduction:
    """The layers in nodes; all layers of a node share a device in every placement that is allowed.

    Attributes:
        nodes: the layers of each node, ascending; in a topological order if contiguity is asked for, else by first
            layer.
        node_of: by layer, its node.
        allowed: by node, the devices that it may be on.
    """

    nodes: tuple[tuple[int, ...], ...]
    node_of: tuple[int, ...]
    allowed: tuple[frozenset[int], ...]

    def of(self, layers: Iterable[int]) -> frozenset[int]:
        """The nodes of some layers."""
        return frozenset(self.node_of[layer] for layer in layers)

    def spread(self, devices: list[int]) -> list[int]:
        """By layer, its device, from the devices of the nodes."""
        return [devices[node] for node in self.node_of]


def reduced(problem: Problem) -> Reduction:
    """Join what must be together.

    A group is one node. Under contiguity so is each strongly connected component of the layer graph with groups joined:
    a path that leaves a device must not come back to it.
    """
    count = len(problem.layers)
    if problem.contiguous:
        nodes = [tuple(component) for component in strong_components(count, arcs_of(problem.values), problem.groups)]
    else:
        members: dict[int, list[int]] = {}
        for layer, first in enumerate(group_of(count, problem.groups)):
            members.setdefault(first, []).append(layer)
        nodes = [tuple(layers) for layers in members.values()]
    node_of = [0] * count
    for node, layers in enumerate(nodes):
        for layer in layers:
            node_of[layer] = node
    allowed = tuple(frozenset.intersection(*(problem.allowed[layer] for layer in layers)) for layers in nodes)
    return Reduction(tuple(nodes), tuple(node_of), allowed)
