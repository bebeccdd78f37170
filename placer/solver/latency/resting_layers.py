"""Layers whose parameters may rest, choices of them, and the devices that can read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import gcd

from placer.schema import Device
from placer.schema.base import LARGEST_BYTES, WHOLE, Tier, module_paths
from placer.solver.problem import Problem

MOST_SUMS = 20_000_000
"""Possible sums of parameters up to which the least one is computed exactly."""


def may_rest(problem: Problem) -> tuple[int, ...]:
    """Return the layers whose parameters are theirs alone, in execution order."""
    tied = {name for tie in problem.request.profile.tied for name in tie.layers}
    users: Counter[str] = Counter(
        path for layer in problem.layers for path in set(module_paths(layer.name))
    )
    return tuple(
        number
        for number, layer in enumerate(problem.layers)
        if layer.param_bytes
        and layer.name != WHOLE
        and layer.name not in tied
        and all(users[path] == 1 for path in module_paths(layer.name))
    )


def evenly(layers: Sequence[int], sizes: Sequence[int], need: int) -> frozenset[int] | None:
    """Return layers of so many bytes, evenly spread, and no layer that is not needed.

    The result is None if all layers have fewer bytes.

    Args:
        layers: in execution order.
        sizes: by layer, in bytes.
        need: in bytes.
    """
    total = sum(sizes[layer] for layer in layers)
    if total < need:
        return None
    chosen: list[int] = []
    # Take a layer when the bytes taken are behind the even share of the bytes passed by at least
    # half of the layer.
    passed = taken = 0
    for layer in layers:
        passed += sizes[layer]
        if taken + sizes[layer] / 2 <= passed * need / total:
            chosen.append(layer)
            taken += sizes[layer]
    # Rounding to whole layers may take too few bytes, or more than needed.
    for layer in sorted(set(layers) - set(chosen), key=lambda one: sizes[one]):
        if taken < need:
            chosen.append(layer)
            taken += sizes[layer]
    for layer in sorted(chosen, key=lambda one: -sizes[one]):
        if taken - sizes[layer] >= need:
            chosen.remove(layer)
            taken -= sizes[layer]
    return frozenset(chosen)


def least_sum(sizes: Sequence[int], need: int) -> int:
    """Return the least sum of some of these sizes that is at least ``need``, or a lower bound.

    The result is larger than any sum of the sizes if no sum suffices.
    """
    if need <= 0:
        return 0
    if sum(sizes) < need:
        return LARGEST_BYTES
    unit = gcd(*sizes)
    if sum(sizes) // unit > MOST_SUMS:
        return need
    # Bit n says whether some of the sizes sum to n units. The result is the lowest such sum from
    # ``first`` on.
    reached = 1
    for size in sizes:
        reached |= reached << size // unit
    first = -(-need // unit)
    above = reached >> first
    return (first + (above & -above).bit_length() - 1) * unit


def readers_of(devices: Sequence[Device], tier: Tier) -> frozenset[int]:
    """Return the devices with measured rates from a tier."""
    return frozenset(
        number
        for number, one in enumerate(devices)
        if one.from_host is not None and (tier == "host" or one.from_disk is not None)
    )
