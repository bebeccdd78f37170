"""Values as nets of nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

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


def joined_nets(problem: Problem, nodes: Reduction, link: Link | None = None) -> list[Net]:
    """The values by their ends, over such a link; those that cannot be cut, or cost nothing, are left out.

    Args:
        problem: what is asked.
        nodes: its layers.
        link: that all values go over; the one that all links are like, if left out.
    """
    link = link or problem.one_link
    assert link is not None
    by_ends: dict[tuple[int, tuple[int, ...]], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for value in problem.values:
        source = nodes.node_of[value.source]
        readers = tuple(sorted(nodes.of(value.readers) - {source}))
        if readers:
            times = by_ends[source, readers]
            times[0] += link.transfer_ms(value.bytes)
            times[1] += link.transfer_ms(value.gradient_bytes) if value.gradient_bytes else 0.0
    return [Net(source, readers, there, back) for (source, readers), (there, back) in by_ends.items() if there or back]


def best_link(links: Sequence[Link]) -> Link:
    """A link that is as good as any of these."""
    return Link(
        source="one device",
        target="another one",
        bandwidth_bytes_per_s=max(link.bandwidth_bytes_per_s for link in links),
        latency_s=min(link.latency_s for link in links),
    )
