"""Reductions that lose nothing: layers that must be on one device are a node, values are nets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from placer.schema import Link
from placer.solver.components import closed_groups, group_of, strong_components
from placer.solver.problem import ROUNDING, Problem
from placer.solver.values import arcs_of


@dataclass(frozen=True)
class Reduction:
    """The layers in nodes; all layers of a node share a device in every placement that is allowed.

    Attributes:
        nodes: the layers of each node, ascending; in a topological order if contiguity is asked
            for, else by first layer.
        node_of: by layer, its node.
        allowed: by node, the devices that it may be on.
    """

    nodes: tuple[tuple[int, ...], ...]
    node_of: tuple[int, ...]
    allowed: tuple[frozenset[int], ...]

    def holding(self, layers: Iterable[int]) -> frozenset[int]:
        """Return the nodes of some layers."""
        return frozenset(self.node_of[layer] for layer in layers)

    def arcs(self, arcs: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
        """Return arcs between layers as arcs between different nodes."""
        found = {(self.node_of[source], self.node_of[reader]) for source, reader in arcs}
        return {(source, reader) for source, reader in found if source != reader}

    def spread(self, devices: list[int]) -> list[int]:
        """Return, by layer, its device, from the devices of the nodes."""
        return [devices[node] for node in self.node_of]


def never_cut(problem: Problem, upper: float) -> list[tuple[int, ...]]:
    """Return layers that share a device in all placements with a bottleneck up to ``upper``."""
    if len(problem.untaxed) > 1:
        return []
    added = problem.request.transfers == "added"
    together = []
    for value in problem.values:
        there = problem.quickest_ms(value.bytes, unlinked_ms=inf)
        back = problem.quickest_ms(value.gradient_bytes, inf) if value.gradient_bytes else 0.0
        if (there + back if added else max(there, back)) > upper * (1 + ROUNDING):
            together.append((value.source, *value.readers))
    return together


def reduced(problem: Problem, upper: float = inf) -> Reduction:
    """Join what must be together.

    Args:
        problem: the placement problem.
        upper: only placements whose objective is no more than this are looked for.

    A group is one node. Under contiguity so is each strongly connected component of the layer graph
    with groups joined: a path that leaves a device must not come back to it.
    """
    groups = problem.groups
    if upper < inf and problem.request.objective == "throughput":
        groups = closed_groups([*groups, *never_cut(problem, upper)])
    return joined(problem, groups)


def joined(problem: Problem, groups: Sequence[tuple[int, ...]]) -> Reduction:
    """Return the nodes if these groups of layers, unions of the problem's, are together."""
    count = len(problem.layers)
    if problem.contiguous:
        nodes = [
            tuple(component)
            for component in strong_components(count, arcs_of(problem.values), groups)
        ]
    else:
        members: dict[int, list[int]] = {}
        for layer, first in enumerate(group_of(count, groups)):
            members.setdefault(first, []).append(layer)
        nodes = [tuple(layers) for layers in members.values()]
    node_of = [0] * count
    for node, layers in enumerate(nodes):
        for layer in layers:
            node_of[layer] = node
    allowed = tuple(
        frozenset.intersection(*(problem.allowed[layer] for layer in layers)) for layers in nodes
    )
    return Reduction(tuple(nodes), tuple(node_of), allowed)


@dataclass(frozen=True)
class Net:
    """Values with the same ends.

    Attributes:
        source: the node that makes them.
        readers: the other nodes that read them.
        there_ms: the time of sending them once.
        back_ms: the time of sending their gradients back once.
    """

    source: int
    readers: tuple[int, ...]
    there_ms: float
    back_ms: float


class Exchange(NamedTuple):
    """Values with the same ends.

    Attributes:
        source: the node that makes them.
        readers: the other nodes that read them.
        number: how many are sent.
        bytes: of all that are sent.
        gradients: how many of them have gradients.
        gradient_bytes: of all of these.
    """

    source: int
    readers: tuple[int, ...]
    number: int
    bytes: int
    gradients: int
    gradient_bytes: int

    def over(self, link: Link) -> Net:
        """Return the net with its times over a link."""
        latency_ms, ms_per_byte = 1e3 * link.latency_s, 1e3 / link.bandwidth_bytes_per_s
        there_ms = self.number * latency_ms + self.bytes * ms_per_byte
        return Net(
            self.source,
            self.readers,
            there_ms,
            self.gradients * latency_ms + self.gradient_bytes * ms_per_byte,
        )


def exchanges(problem: Problem, nodes: Reduction) -> list[Exchange]:
    """Return the values that nodes exchange, joined by their ends."""
    found: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for value in problem.values:
        source = nodes.node_of[value.source]
        readers = tuple(sorted(nodes.holding(value.readers) - {source}))
        if readers:
            sums = found[source, readers]
            sums[0] += value.repeats
            sums[1] += value.repeats * value.bytes
            sums[2] += value.gradient_bytes > 0
            sums[3] += value.gradient_bytes
    return [Exchange(*ends, *sums) for ends, sums in found.items()]


def joined_nets(problem: Problem, nodes: Reduction, link: Link | None = None) -> list[Net]:
    """Return the values by their ends, over such a link.

    Those that cannot be cut, or cost nothing, are left out.

    Args:
        problem: the placement problem.
        nodes: its layers.
        link: that all values go over; the one that all links are like, if left out.
    """
    link = link or problem.one_link
    assert link is not None
    nets = [exchange.over(link) for exchange in exchanges(problem, nodes)]
    return [net for net in nets if net.there_ms or net.back_ms]


def cut_costs(nets: Iterable[Net]) -> dict[tuple[int, ...], float]:
    """Return, by ends of nets, ascending, the time of the nets there and back if they are cut."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for net in nets:
        found[tuple(sorted((net.source, *net.readers)))] += net.there_ms + net.back_ms
    return found


def best_link(links: Sequence[Link]) -> Link:
    """Return a link that is as good as any of these."""
    return Link(
        source="one device",
        target="another one",
        bandwidth_bytes_per_s=max(link.bandwidth_bytes_per_s for link in links),
        latency_s=min(link.latency_s for link in links),
    )
