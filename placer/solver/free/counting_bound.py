"""Bounds by counting: some device holds several heavy nodes, and pays for cutting them off.

Of m K + 1 nodes one of K devices holds m + 1. So the bottleneck is at least the least load of all
sets with m + 1 of them::

    ●──●──○──●──●──○──●──●──○──●     7 heavy nodes (●) on 3 devices: one holds 3 of them,
       └─────────────┘               and pays for what it cuts off

``subset_sweep.py`` finds the set; worths that are integers make few labels. Devices that pay for no
transfer hold as many of the nodes as they can within the known bottleneck, and so many nodes more
are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from placer.solver.cpsat.runner import PER_WORK
from placer.solver.free.column_generation import LABELS
from placer.solver.free.set_graph import SetGraph, set_graph
from placer.solver.free.subset_sweep import Stopped, Subsets
from placer.solver.problem import ROUNDING, Problem
from placer.solver.reduce import Reduction

MOST_HELD = 8
"""The most heavy nodes that a device is proven to hold: more take many labels."""


Over = Callable[[float], bool]
"""Counts work and returns whether the search must end."""


def count_bound(problem: Problem, nodes: Reduction, upper: float, over: Over) -> float:
    """Return a lower bound on the bottleneck of free placements in ms, at most ``upper``.

    Args:
        problem: the placement problem, of the kind that ``set_graph.applies`` names.
        nodes: its layers, joined where they must be together.
        upper: the bottleneck that is to be proven.
        over: ends the search.
    """
    graph = set_graph(problem, nodes)
    if graph is None:
        return 0.0
    work_ms = graph.fastest.work_ms
    heavy = sorted(range(len(work_ms)), key=lambda node: -work_ms[node])
    subsets = Subsets(graph.fastest.steps, work_ms, upper, lambda: over(0.0))
    bound = 0.0
    for held in range(2, MOST_HELD + 1):
        counted = _enough(graph, heavy, (held - 1) * graph.fastest.devices + 1, upper)
        if counted is None or bound >= upper or over(0.0):
            break
        prices = [1 / held if node in counted else 0.0 for node in range(len(heavy))]
        try:
            # Each counted node is worth 1 / held. The margin of half a node allows for rounding.
            found = subsets.search(prices, 1 - 0.5 / held, LABELS.usual)
        except Stopped:
            break
        bound = max(bound, min(found.least_ms, upper))
        over((found.labels + PER_WORK.labels_of_a_search) / PER_WORK.labels)
    return bound


def _enough(
    graph: SetGraph, heavy: Sequence[int], least: int, upper: float
) -> frozenset[int] | None:
    """Return as many heavy nodes as make devices that pay for transfers hold ``least`` of them.

    The result is None if there are too few.
    """
    count = least
    while count <= len(heavy):
        missing = (
            least + sum(_most_held(times, heavy[:count], upper) for times in graph.free_ms) - count
        )
        if missing <= 0:
            return frozenset(heavy[:count])
        # Each further node may go to a device without transfers, so count again with more nodes.
        count += missing
    return None


def _most_held(times_ms: Sequence[float], nodes: Sequence[int], upper: float) -> int:
    """Return how many of the nodes a device can hold that pays for no transfer."""
    left, held = upper * (1 + ROUNDING), 0
    for time_ms in sorted(times_ms[node] for node in nodes):
        left -= time_ms
        if left < 0:
            break
        held += 1
    return held
