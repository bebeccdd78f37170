"""Assignments of small latency: cuts of linear orders, and moves of single nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import inf
from random import Random
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from .latency import CPU, PROVEN_GAP, Graph, finish_ms, longest_way
from .latency_bound import Proof

Table = NDArray[np.float64]
ORDERS_SHARE = 0.3
"""How much of the time cuts of orders may take."""

FRESH_ORDERS = 4
CLIMB_PATIENCE = 60
"""So many orders in a row that bring nothing better end a climb; another begins."""

REDRAWN = (0.01, 0.03, 0.1, 0.3)
"""The share of ranks that are drawn anew for the next order."""

ON_WAY = 0.7
"""How many of the moves begin on the longest way."""

WHOLE = 0.1
"""How many of the moves take all of what is connected, and on one device."""

PATIENCE = 2000
WORSE = 2e-3
"""How much longer an assignment may be that moves go on from, as a share, after ``PATIENCE`` moves
without gain."""


def improved(read: Graph, proof: Proof, until: float, seed: int = 0) -> tuple[list[int], float]:
    """Return the best assignment found, by node, and its latency.

    Args:
        read: the input.
        proof: a proof whose subgraphs are tried first, and whose bound ends the search.
        until: the time limit on the monotonic clock.
        seed: the seed of the random orders and moves.
    """
    began, random = monotonic(), Random(seed)
    enough = proof.bound * (1 + PROVEN_GAP / 2)
    best = [CPU] * len(read.ids)
    value = _value(read, best)
    for tried in chain([_numbered(read, proof.subgraphs)], _climbs(read, random)):
        found = _value(read, tried)
        if found < value:
            best, value = tried, found
        if value <= enough or monotonic() > began + ORDERS_SHARE * (until - began):
            break
    if value <= enough:
        return best, value
    first = _numbered(read, proof.subgraphs)
    middle = (monotonic() + until) / 2
    others = _moved(read, first, _value(read, first), enough, middle, random)
    if others[1] < value:
        best, value = others
    return _moved(read, best, value, enough, until, random)


def _value(read: Graph, where: Sequence[int]) -> float:
    found = finish_ms(read, where)
    return inf if found is None else found


def _numbered(read: Graph, subgraphs: Sequence[frozenset[int]]) -> list[int]:
    where = [CPU] * len(read.ids)
    for device, nodes in enumerate(subgraphs):
        for node in nodes:
            where[node] = device
    return where


def _climbs(read: Graph, random: Random) -> Iterator[list[int]]:
    """Yield the best cuts of orders.

    Each order redraws some ranks of the best order so far, from time to time all of them.
    """
    count = len(read.ids)
    while True:
        best, rank = inf, [0.0] * count
        turn = idle = 0
        while idle < CLIMB_PATIENCE:
            share = 1.0 if turn < FRESH_ORDERS else random.choice(REDRAWN)
            tried = [random.random() if random.random() < share else old for old in rank]
            cut = _best_cut(read, _order(read, tried))
            found = _value(read, cut)
            turn, idle = turn + 1, 0 if found < best else idle + 1
            if found <= best:
                best, rank = found, tried
            yield cut


def _order(read: Graph, rank: Sequence[float]) -> list[int]:
    """Return a topological order by rank with each source right before its first reader.

    Nodes without sources, such as constants, would otherwise come first.
    """
    order: list[int] = []
    seen = [False] * len(read.ids)
    ends = [node for node, readers in enumerate(read.readers) if not readers]
    # The main output depends on most nodes and goes last, so that a side branch comes right
    # where it is made.
    stack = [(node, False) for node in sorted(ends, reverse=True)]
    while stack:
        node, entered = stack.pop()
        if entered:
            order.append(node)
        elif not seen[node]:
            seen[node] = True
            stack.append((node, True))
            stack += [
                (source, False) for source in sorted(read.sources[node], key=rank.__getitem__)
            ]
    return order


def _best_cut(read: Graph, order: Sequence[int]) -> list[int]:
    """Return the best way to cut an order into subgraphs and CPU parts.

    Each part waits for the part before it.
    """
    place = {node: index for index, node in enumerate(order)}
    count, most = len(order), read.accelerators
    block, chain = _blocks(read, order, place), _chains(read, order, place)
    best = np.full((most + 1, count + 1), inf)
    best[:, 0] = 0.0
    ended = best.copy()  # orders whose last part is a subgraph, or empty
    came = np.full((2, most + 1, count + 1), -1)
    for end in range(1, count + 1):
        through = best[:-1, :end] + block[:end, end - 1]
        came[0, 1:, end] = through.argmin(axis=1)
        ended[1:, end] = through.min(axis=1)
        on_cpu = ended[:, :end] + chain[:end, end - 1]
        came[1, :, end] = on_cpu.argmin(axis=1)
        best[:, end] = np.minimum(ended[:, end], on_cpu.min(axis=1))
    where, used, end, may_end_on_cpu = [CPU] * count, most, count, True
    while end:
        if may_end_on_cpu and best[used, end] < ended[used, end]:
            end, may_end_on_cpu = int(came[1, used, end]), False
            continue
        first = int(came[0, used, end])
        for index in range(first, end):
            where[order[index]] = used - 1
        used, end, may_end_on_cpu = used - 1, first, True
    return where


def _blocks(read: Graph, order: Sequence[int], place: dict[int, int]) -> Table:
    """Return, by first and last position, a subgraph's time; infinite where it does not fit."""
    count = len(order)
    able = np.array([read.accelerator_ms[node] < inf for node in order])
    time = np.cumsum(
        [
            0.0,
            *(
                read.accelerator_ms[node] if may else 0.0
                for node, may in zip(order, able, strict=True)
            ),
        ]
    )
    barred = np.cumsum([0, *~able])
    size = np.cumsum([0.0, *(read.size[node] for node in order)])
    found: Table = time[None, 1:] - time[:-1, None]
    found[size[None, 1:] - size[:-1, None] > read.memory] = inf
    found[barred[None, 1:] > barred[:-1, None]] = inf
    found[np.tril_indices(count, -1)] = inf
    for node in order:
        here, readers = place[node], sorted(place[reader] for reader in read.readers[node])
        if not readers:
            continue
        found[: here + 1, here : readers[-1]] += read.transfer_ms[node]
        for before, reader in zip([here, *readers], readers, strict=False):
            found[before + 1 : reader + 1, reader:] += read.transfer_ms[node]
    for group in read.classes:
        first, last = min(place[node] for node in group), max(place[node] for node in group)
        found[first + 1 : last + 1, first:] = inf
        found[: last + 1, first:last] = inf
    return found


def _chains(read: Graph, order: Sequence[int], place: dict[int, int]) -> Table:
    """Return, by first and last position, the longest chain on the CPU."""
    ends = np.zeros((len(order), len(order)))
    for index, node in enumerate(order):
        longest = np.zeros(index + 1)
        for source in read.sources[node]:
            longest = np.maximum(longest, ends[: index + 1, place[source]])
        ends[: index + 1, index] = longest + read.cpu_ms[node]
    longest_so_far: Table = np.maximum.accumulate(ends, axis=1)
    return longest_so_far


def _moved(
    read: Graph, best: list[int], value: float, enough: float, until: float, random: Random
) -> tuple[list[int], float]:
    """Move chains of nodes on the longest path across the borders of subgraphs."""
    here, at, idle = best, value, 0
    way = _on_longest_way(read, here)
    while value > enough and monotonic() < until:
        tried = _neighbour(
            read, here, way if random.random() < ON_WAY else range(len(here)), random
        )
        found = _value(read, tried)
        idle += 1
        if found < at or (
            found <= at * (1 + WORSE * random.random()) and (found == at or idle > PATIENCE)
        ):
            here, at = tried, found
            way = _on_longest_way(read, here)
        if found < value:
            best, value, idle = tried, found, 0
        if idle > 3 * PATIENCE:
            here, at, idle = best, value, 0
            way = _on_longest_way(read, here)
    return best, value


def _on_longest_way(read: Graph, where: Sequence[int]) -> list[int]:
    """Return the nodes on the CPU and in subgraphs that determine the latency."""
    found = longest_way(read, where)
    units = set(found[1]) if found is not None else set()
    count = len(where)
    return [
        n for n, device in enumerate(where) if (n if device == CPU else count + device) in units
    ] or [0]


def _neighbour(read: Graph, where: list[int], some: Sequence[int], random: Random) -> list[int]:
    """Return an assignment with some nodes moved, each next to the node before.

    They move to the device of a neighbour, to an empty device, or to the CPU.
    """
    tried = list(where)
    node = random.choice(some)
    near = [*read.sources[node], *read.readers[node]]
    for _ in range(20):
        if any(where[other] != where[node] for other in near):
            break
        node = random.choice(some)
        near = [*read.sources[node], *read.readers[node]]
    free = next((device for device in range(read.accelerators) if device not in where), CPU)
    target = random.choice([*(where[other] for other in near), CPU, free])
    source = where[node]
    if random.random() < WHOLE:
        for one in _together(read, where, node):
            tried[one] = target
        return tried
    for _ in range(random.choice((1, 1, 1, 2, 3, 5, 8, 13, 21, 34))):
        for sibling in read.siblings[node]:
            tried[sibling] = target
        beyond = [
            n
            for n in (*read.sources[node], *read.readers[node])
            if tried[n] == source and n != node
        ]
        if not beyond:
            break
        node = random.choice(beyond)
    return tried


def _together(read: Graph, where: Sequence[int], node: int) -> set[int]:
    """Return the nodes connected with a node on its device, with all of their classes."""
    found, stack = {node}, [node]
    while stack:
        one = stack.pop()
        for other in (*read.sources[one], *read.readers[one], *read.siblings[one]):
            if other not in found and where[other] == where[node]:
                found.add(other)
                stack.append(other)
    return found
