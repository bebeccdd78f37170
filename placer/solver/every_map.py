"""Enumeration of every map of layers to devices, for problems with few maps.

The integer programs are less exact than ``costs``: they do not decide recomputation per device, and
they count memory beyond 2**50 bytes in larger units. The cost of a single map is exact. The
enumeration thus proves that its best map is optimal, or that no map meets the requirements.

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
from placer.solver.cpsat.runner import PER_WORK
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction
from placer.solver.search import Search
from placer.solver.values import arcs_of

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
    return map(nodes.spread, _maps(nodes, before))


def _maps(nodes: Reduction, before: dict[int, int]) -> Iterator[list[int]]:
    """Yield, by node, its device.

    One with a device ``before`` it only where that is used by an earlier node.
    """
    choices = [sorted(allowed) for allowed in nodes.allowed]
    # depth-first without recursion: a model may have thousands of nodes
    taken: list[int] = []
    left = [iter(choices[0])]
    while left:
        device = next(left[-1], None)
        if device is None:
            left.pop()
            del taken[-1:]
        elif device in taken or before.get(device, device) in (device, *taken):
            if len(left) == len(choices):
                yield [*taken, device]
            else:
                taken.append(device)
                left.append(iter(choices[len(taken)]))


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


METHOD = "every map"


def try_all(search: Search) -> list[int] | None:
    """Offer every map where they are few, and prove the best of them.

    Returns:
        Where none is a placement the one that comes closest to the memory limits, by layer its
        device; empty if none meets all else. None where there is a placement, or none is proven.
    """
    problem, proven = search.problem, True
    every = few(problem, search.nodes)
    nearest: tuple[float, list[int]] = (inf, [])
    for devices in every or ():
        if search.counted(1 / PER_WORK.maps):
            return None
        result = costs.evaluate(problem, devices) if costs.allowed(problem, devices) else None
        if result is None or result.objective_value > search.value:
            continue
        search.offer(devices, METHOD)
        # it does not fit, in this order of its stages
        if result.objective_value < search.value:
            proven = proven and (
                not problem.training or has_one_order(problem, devices, result.stages)
            )
            nearest = min(nearest, (missing_bytes(problem, devices), devices))
    if every is None or not proven:
        return None
    search.prove(search.nothing_below() if search.best is None else search.value)
    return nearest[1] if search.best is None else None
