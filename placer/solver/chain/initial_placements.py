"""Placements to start from, each found without a search of the whole space.

**Class rows.** ``optimal_cuts.py`` prices every transfer at the fastest link. Where hosts differ,
it cuts as if they were one. Here the devices of each class follow one another, in one of few orders
of the classes::

    nodes    0 1 2 | 3 4 | 5 6 7 | 8 9      the two stages at a border of classes pay for
    devices    a      a  ║   b      b       their values over the link between the classes

The cut is only a start: the cost model decides what it is worth.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf
from random import Random

import numpy as np
from numpy.typing import NDArray

from placer.schema import Link
from placer.solver.chain import optimal_cuts
from placer.solver.components import sources_and_readers, topological_order
from placer.solver.cpsat.runner import PER_WORK
from placer.solver.problem import ROUNDING, Problem
from placer.solver.reduce import Reduction, best_link, exchanges, reduced
from placer.solver.values import arcs_of

MOST_WORK, MOST_TABLE_WORK = 0.8, 8 / 3
"""The most work of all cuts of random orders, and of their tables: below a second, and seconds."""

PATIENCE = 4
"""Orders without improvement after which no more follow."""


Over = Callable[[float], bool]
"""Counts work and returns whether the time, or the work, is over."""


@dataclass(frozen=True)
class Start:
    """An assignment and what is proven on the way.

    Attributes:
        devices: by layer, its device; None if none was found. It may break requirements.
        bound: a proven lower bound on the objective.
        method: what found it.
    """

    devices: list[int] | None
    bound: float
    method: str


def starts(problem: Problem, nodes: Reduction, over: Over) -> Iterator[Start]:
    """Yield starts for the search, the most promising first.

    When the time is over, only starts that take no time follow.
    """
    if problem.contiguous:
        cut = optimal_cuts.best_cut(problem, nodes)
        yield Start(cut.devices, cut.bound, "linear order")
        yield from _class_rows(problem, nodes, over)
    else:
        yield from _free_starts(problem, over)
    for alike in problem.alike_devices():
        yield Start([alike[0]] * len(problem.layers), 0.0, "one device")


def _class_rows(problem: Problem, nodes: Reduction, over: Over) -> Iterator[Start]:
    """Yield cuts in which the devices of each class follow one another."""
    if problem.request.objective == "throughput" and not over(0.0):
        for devices in cuts(problem, nodes):
            yield Start(devices, 0.0, "linear order")
            if over(0.0):
                return


def other_orders(problem: Problem, nodes: Reduction, over: Over) -> Iterator[Start]:
    """Yield cuts of random topological orders, as many as take little time."""
    if not optimal_cuts.is_only_order(problem, nodes):
        numbers = optimal_cuts.work_of_cut(problem, nodes)
        ends = len(problem.layers) + optimal_cuts.ends_of_values(problem)
        # The table of the cut and the tables of its intervals both take time, each with its own
        # time per entry.
        work = numbers / PER_WORK.numbers + ends / PER_WORK.ends
        turns = min(
            int(MOST_WORK * PER_WORK.numbers) // numbers,
            int(MOST_TABLE_WORK * PER_WORK.ends) // ends,
        )
        yield from _climb(problem, nodes, turns, partial(over, work))


def _climb(
    problem: Problem, nodes: Reduction, turns: int, over: Callable[[], bool]
) -> Iterator[Start]:
    """Yield cuts of random topological orders; later orders vary the best earlier one.

    Args:
        problem: the placement problem, contiguity understood.
        nodes: its layers in nodes.
        turns: how many orders.
        over: asked before each; ends them.
    """
    count = len(nodes.nodes)
    arcs = nodes.arcs(arcs_of(problem.values))
    neighbours, exchanged = _neighbours(problem, nodes), exchanges(problem, nodes)
    ways: list[Callable[[list[float]], list[int]]] = [
        lambda rank: _late_order(count, arcs, rank, neighbours),
        lambda rank: topological_order(count, arcs, rank),
        lambda rank: _narrow_order(count, arcs, rank),
    ]
    random = Random(f"{problem.request.seed}")
    best, best_rank, way = inf, [random.random() for _ in range(count)], ways[0]
    idle = 0
    for turn in range(turns):
        if over():
            return
        # The first orders are independent; later ones change a share of the best order's ranks.
        share = 1.0 if turn <= PATIENCE else random.choice((0.02, 0.1, 0.3))
        rank = [random.random() if random.random() < share else old for old in best_rank]
        tried = ways[turn] if turn < len(ways) else way
        cut = optimal_cuts.best_cut(problem, nodes, tried(rank), exchanged)
        idle = 0 if cut.value < best * (1 - ROUNDING) else idle + 1
        if cut.value <= best:
            best, best_rank, way = cut.value, rank, tried
        yield Start(cut.devices, 0.0, "linear order")
        if idle >= PATIENCE:
            return


def _late_order(
    count: int, arcs: set[tuple[int, int]], rank: list[float], pulls: list[list[int]]
) -> list[int]:
    """Return a random topological order that keeps neighbours close.

    All that a node needs comes right before it.
    """
    before, _ = sources_and_readers(count, arcs)
    for sources in before:
        sources.sort(key=lambda node: rank[node])
    ordered = {node for arc in arcs for node in arc}
    order: list[int] = []
    placed = [False] * count
    # Depth-first search from each root, with an explicit stack: deep models would exceed Python's
    # limit of recursion. Nodes without arcs come last and are inserted below.
    for root in sorted(range(count), key=lambda node: (node not in ordered, rank[node])):
        stack = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if placed[node]:
                continue
            if ready:
                placed[node] = True
                order.append(node)
            else:
                stack.append((node, True))
                stack += [
                    (source, False) for source in reversed(before[node]) if not placed[source]
                ]
    return _with_strays(order, ordered, pulls)


def _narrow_order(count: int, arcs: set[tuple[int, int]], rank: list[float]) -> list[int]:
    """Return a topological order in which few nodes at a time wait for readers.

    Cuts of it cut few values.
    """
    sources, readers = sources_and_readers(count, arcs)
    waiting, unread = [len(nodes) for nodes in sources], [len(nodes) for nodes in readers]
    # opened[n]: how many more values wait for readers after n has run. A node that is the last
    # reader of its inputs closes more than it opens:
    #    value ends waiting     a ──▶ [n] ──▶ b        n reads the last of a's value: +1 - 1 = 0
    opened = [
        bool(readers[node]) - sum(unread[source] == 1 for source in sources[node])
        for node in range(count)
    ]
    ready = [(opened[node], rank[node], node) for node in range(count) if not waiting[node]]
    heapify(ready)
    order: list[int] = []
    placed = [False] * count
    while ready:
        *_, node = heappop(ready)
        if placed[node]:
            continue
        placed[node] = True
        order.append(node)
        for source in sources[node]:
            unread[source] -= 1
            # its last reader closes it, and is ready again with a smaller key
            if unread[source] == 1:
                last = next(reader for reader in readers[source] if not placed[reader])
                opened[last] -= 1
                if not waiting[last]:
                    heappush(ready, (opened[last], rank[last], last))
        for reader in readers[node]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heappush(ready, (opened[reader], rank[reader], reader))
    return order


def _with_strays(order: list[int], ordered: set[int], pulls: list[list[int]]) -> list[int]:
    """Return an order whose unordered nodes are next to the middle one of their neighbours."""
    place = {node: index for index, node in enumerate(node for node in order if node in ordered)}
    key = {node: float(index) for node, index in place.items()}
    for node in order:
        if node not in ordered:
            near = sorted(key[other] for other in pulls[node] if other in key)
            # The median minimises the sum of distances to the neighbours.
            key[node] = near[len(near) // 2] + 0.5 if near else float(len(order))
    return sorted(order, key=lambda node: key[node])


def _neighbours(problem: Problem, nodes: Reduction) -> list[list[int]]:
    """Return, by node, those that it exchanges values with."""
    near: list[set[int]] = [set() for _ in nodes.nodes]
    for value in problem.values:
        ends = nodes.holding((value.source, *value.readers))
        for node in ends:
            near[node] |= ends - {node}
    return [sorted(nodes) for nodes in near]


def _free_starts(problem: Problem, over: Over) -> Iterator[Start]:
    """Yield contiguous placements, which are also valid free placements.

    Further starts ignore colocation and bring the groups together afterwards.
    """
    contiguous = replace(problem, contiguous=True)
    nodes = reduced(contiguous)
    if all(nodes.allowed):
        yield Start(optimal_cuts.best_cut(contiguous, nodes).devices, 0.0, "linear order")
        yield from _class_rows(contiguous, nodes, over)
        if problem.request.objective == "throughput":
            yield from other_orders(contiguous, nodes, over)
    if problem.groups and not over(0.0):
        apart = replace(contiguous, groups=())
        cut = optimal_cuts.best_cut(apart, reduced(apart)).devices
        # The cut ignores colocation. Each start moves every group to the device of one of its
        # members: first members, then second members, and so on.
        for member in range(max(len(group) for group in problem.groups)) if cut is not None else ():
            devices = list(cut or ())
            for group in problem.groups:
                for layer in group:
                    devices[layer] = (cut or ())[group[min(member, len(group) - 1)]]
            yield Start(devices, 0.0, "linear order")


CLASS_ORDERS = 6
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
    links = problem.kinds_of_links
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
    for order in itertools.islice(itertools.permutations(range(len(classes))), CLASS_ORDERS):
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
