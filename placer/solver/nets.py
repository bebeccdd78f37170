"""Values as nets of nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from placer.schema import Link
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction


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


def best_link(links: Sequence[Link]) -> Link:
    """Return a link that is as good as any of these."""
    return Link(
        source="one device",
        target="another one",
        bandwidth_bytes_per_s=max(link.bandwidth_bytes_per_s for link in links),
        latency_s=min(link.latency_s for link in links),
    )
