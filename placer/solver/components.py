"""Graph algorithms: union of overlapping groups, strong components, topological order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

Arc = tuple[int, int]


def closed_groups(groups: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of two or more, joined where they share a member, each ascending."""
    parent: dict[int, int] = {}

    def root(member: int) -> int:
        while parent.setdefault(member, member) != member:
            parent[member] = member = parent[parent[member]]
        return member

    for group in groups:
        for member in group:
            parent[root(member)] = root(group[0])
    members: dict[int, list[int]] = {}
    for member in parent:
        members.setdefault(root(member), []).append(member)
    return tuple(sorted(tuple(sorted(group)) for group in members.values() if len(group) > 1))


def group_of(count: int, groups: Iterable[Sequence[int]]) -> list[int]:
    """Return, by vertex, the smallest member of its group; itself if in none."""
    first = list(range(count))
    for group in groups:
        smallest = min(group)
        for member in group:
            first[member] = smallest
    return first


def sources_and_readers(count: int, arcs: Iterable[Arc]) -> tuple[list[list[int]], list[list[int]]]:
    """Return, by vertex, where its arcs come from, and where they lead; in the order of the arcs.

    Args:
        count: the number of vertices.
        arcs: pairs of a source and a vertex that reads from it.
    """
    sources: list[list[int]] = [[] for _ in range(count)]
    readers: list[list[int]] = [[] for _ in range(count)]
    for source, reader in arcs:
        sources[reader].append(source)
        readers[source].append(reader)
    return sources, readers


def strong_components(
    count: int, arcs: Iterable[Arc], groups: Iterable[Sequence[int]]
) -> list[list[int]]:
    """Return the strong components, in topological order, where every group counts as one vertex.

    Args:
        count: the number of vertices.
        arcs: pairs of vertices.
        groups: disjoint sets of vertices that count as one.

    Returns:
        The vertices of each component, ascending. Of the topological orders, the one that follows
        their first vertices.

    Source: Tarjan, "Depth-first search and linear graph algorithms", 1972.
    """
    first = group_of(count, groups)
    successors: dict[int, set[int]] = {vertex: set() for vertex in set(first)}
    for source, target in arcs:
        if first[source] != first[target]:
            successors[first[source]].add(first[target])
    component = _tarjan(successors)
    label = [component[first[vertex]] for vertex in range(count)]
    members: dict[int, list[int]] = {}
    for vertex in range(count):
        members.setdefault(label[vertex], []).append(vertex)
    ordered = sorted(members.values())
    number = {label[vertices[0]]: index for index, vertices in enumerate(ordered)}
    between = {
        (number[component[source]], number[component[target]])
        for source, targets in successors.items()
        for target in targets
        if component[source] != component[target]
    }
    return [ordered[index] for index in topological_order(len(ordered), between)]


def topological_order(
    count: int, arcs: Iterable[Arc], rank: Sequence[float] | None = None
) -> list[int]:
    """Return the vertices so that every arc runs forwards, the smallest rank first on a choice.

    A vertex on a cycle, or behind one, is left out.

    Args:
        count: how many vertices there are.
        arcs: pairs of vertices.
        rank: by vertex; its number if left out.
    """
    place = rank if rank is not None else range(count)
    sources, successors = sources_and_readers(count, set(arcs))
    waiting = [len(own) for own in sources]
    ready = [(place[vertex], vertex) for vertex in range(count) if not waiting[vertex]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, vertex = heapq.heappop(ready)
        order.append(vertex)
        for target in successors[vertex]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, (place[target], target))
    return order


def _tarjan(successors: dict[int, set[int]]) -> dict[int, int]:
    """Return, by vertex, a label of its component; without recursion, as graphs are deep."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    component: dict[int, int] = {}
    stack: list[int] = []
    for root in sorted(successors):
        if root in index:
            continue
        index[root] = low[root] = len(index)
        stack.append(root)
        work = [(root, iter(sorted(successors[root])))]
        while work:
            vertex, targets = work[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    work.append((target, iter(sorted(successors[target]))))
                    break
                if target not in component:
                    low[vertex] = min(low[vertex], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[vertex])
                if low[vertex] == index[vertex]:
                    _close(vertex, stack, component)
    return component


def _close(root: int, stack: list[int], component: dict[int, int]) -> None:
    while True:
        vertex = stack.pop()
        component[vertex] = root
        if vertex == root:
            return
