"""Cuts of a linear order in which devices of one class follow one another.

``optimal_cuts.py`` prices every transfer at the fastest link. Where hosts differ, it cuts as if
they were one. Here the devices of each class follow one another, in one of few orders of the
classes::

    nodes    0 1 2 | 3 4 | 5 6 7 | 8 9      the two stages at a border of classes pay for
    devices    a      a  ║   b      b       their values over the link between the classes

The cut is only a start: the cost model decides what it is worth.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from placer.schema import Link
from placer.solver.chain import optimal_cuts
from placer.solver.nets import best_link
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction

MOST_ORDERS = 6
"""The most orders of the classes that are cut: three classes have six."""

Times = NDArray[np.float64]


def cuts(problem: Problem, nodes: Reduction) -> Iterator[list[int]]:
    """Return, by layer, its device, of the best cut for each of some orders of the classes.

    The result is None where all links are alike.

    Args:
        problem: the placement problem, by objective ``throughput``, contiguity understood.
        nodes: its layers in nodes, in topological order.
    """
    classes, _ = optimal_cuts.device_classes(problem)
    links = [link for row in problem.links for link in row if link is not None]
    if (
        len(nodes.nodes) > optimal_cuts.MOST_NODES
        or len(classes) < 2
        or not links
        or problem.one_link is not None
    ):
        return
    table = optimal_cuts.CutTable(
        problem, nodes, [[node] for node in range(len(nodes.nodes))], classes
    )
    for order in itertools.islice(itertools.permutations(range(len(classes))), MOST_ORDERS):
        kinds = [kind for kind in order for _ in classes[kind]]
        found = _best(table, kinds, _passing(problem, nodes, classes, order, best_link(links)))
        if found is not None:
            devices = itertools.chain(*(classes[kind] for kind in order))
            yield nodes.spread(
                [device for device, held in zip(devices, found, strict=True) for _ in held]
            )


def _passing(
    problem: Problem,
    nodes: Reduction,
    classes: Sequence[Sequence[int]],
    order: Sequence[int],
    fastest: Link,
) -> dict[tuple[int, int], Times]:
    """Return, by two neighbouring classes and border, the extra time over the fastest link."""
    found = {}
    for pair in itertools.pairwise(order):
        one, other = (classes[kind][0] for kind in pair)
        # Without a direct link this is an underestimate. The cost model rejects such a start later.
        there, back = problem.links[one][other] or fastest, problem.links[other][one] or fastest
        passing = np.zeros(len(nodes.nodes) + 1)
        for value in problem.values:
            first, last = nodes.node_of[value.source], max(nodes.holding(value.readers))
            more_ms = there.transfer_ms(value.bytes) - fastest.transfer_ms(value.bytes)
            if value.gradient_bytes:
                more_ms += back.transfer_ms(value.gradient_bytes) - fastest.transfer_ms(
                    value.gradient_bytes
                )
            # The value crosses every border between its source and its last reader.
            passing[first + 1 : last + 1] += more_ms
        found[pair] = passing
    return found


def _best(
    table: optimal_cuts.CutTable, kinds: Sequence[int], passing: dict[tuple[int, int], Times]
) -> list[range] | None:
    """Return, by device in their order, its nodes in the cut with the smallest bottleneck.

    The result is None if there is no such cut.

    Args:
        table: what stages cost.
        kinds: by device, its class.
        passing: as ``_passing`` tells it.
    """
    count = len(table.blocks)
    nothing = np.zeros(count + 1)
    # A border costs both neighbours: one sends and the other receives.
    borders = [
        nothing,
        *(passing.get(pair, nothing) for pair in itertools.pairwise(kinds)),
        nothing,
    ]
    # later[i]: the smallest bottleneck of nodes i, i+1, ... on the devices from `place` on. The
    # dynamic program fills it from the last device to the first.
    later = np.append(np.full(count, np.inf), 0.0)
    ends = []
    for place in reversed(range(len(kinds))):
        stage = (
            table.cost(kinds[place], len(kinds) - place)
            + borders[place][:, None]
            + borders[place + 1][None, :]
        )
        options = np.maximum(stage, later[None, :])
        options[range(count + 1), range(count + 1)] = later  # it holds nothing
        ends.append(options.argmin(axis=1))
        later = options.min(axis=1)
    if not np.isfinite(later[0]):
        return None
    held, start = [], 0
    for end in reversed(ends):
        held.append(range(start, int(end[start])))
        start = held[-1].stop
    return held
