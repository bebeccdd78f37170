"""Enumeration of all maps of a small problem, and the distance of a map from the memory limits.

Where the model is not a chain, bounds are weak. If there are few maps, simulating each of them
proves the best one, or that none is feasible. Devices that are alike are taken in their order, as
exchanging them changes nothing.

A map is evaluated in one order of its stages (see ``costs``). Where values allow another order, its
step may be shorter, so the enumeration gives no bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf, prod

from placer.solver import costs
from placer.solver.problem import Problem, arcs_of
from placer.solver.reduce import Reduction

MOST = 1_000
"""The most maps that are enumerated: about five seconds."""


def few(problem: Problem, nodes: Reduction, most: float = MOST) -> Iterator[list[int]] | None:
    """Return, by layer, its device, for every map; None if they are not few.

    Args:
        problem: the placement problem.
        nodes: its layers in nodes.
        most: fewer than ``MOST`` that are few, where it is less.
    """
    if prod(map(len, nodes.allowed)) > min(most, MOST):
        return None
    before = {
        device: members[place - 1]
        for members in problem.alike_devices()
        for place, device in enumerate(members)
        if place
    }
    return map(nodes.spread, _maps(nodes, before, []))


def _maps(nodes: Reduction, before: dict[int, int], taken: list[int]) -> Iterator[list[int]]:
    """Return, by node, its device.

    One with a device ``before`` it only where that is used by an earlier node.
    """
    if len(taken) == len(nodes.nodes):
        yield taken
        return
    for device in sorted(nodes.allowed[len(taken)]):
        if device in taken or before.get(device, device) in (device, *taken):
            yield from _maps(nodes, before, [*taken, device])


def has_one_order(problem: Problem, assignment: Sequence[int], stages: Sequence[int]) -> bool:
    """Return whether the stages of a map can follow one another in no other order."""
    feeds = {(assignment[source], assignment[reader]) for source, reader in arcs_of(problem.values)}
    return not problem.contiguous or all(pair in feeds for pair in pairwise(stages))


def missing_bytes(problem: Problem, assignment: list[int]) -> float:
    """Return the bytes that devices lack together for a map.

    It is infinite if the map breaks a requirement other than memory.
    """
    result = costs.evaluate(problem, assignment) if costs.allowed(problem, assignment) else None
    if result is None:
        return inf
    pairs = zip(result.memory, problem.devices, strict=True)
    return sum(max(0, use.total_bytes - device.usable_bytes) for use, device in pairs)
