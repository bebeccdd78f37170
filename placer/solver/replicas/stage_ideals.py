"""Ideals: the sets of layers that the first stages of a plan can hold together.

An ideal contains all layers that its layers depend on. A plan is a chain of ideals, and each stage
is the difference of two neighbours::

    {} < {0, 1} < {0, 1, 2, 4} < all
     stage  a         b         c

Layers that must be together are a node. Two kinds of layers that cost nothing would double the
number of ideals each, so they have a fixed place, which makes no plan worse:

    a layer that nobody reads, and that reads one node       with this node
    a layer whose values have no bytes, and that reads       at the first stage that reads it; it
    none but such layers                                     is in every ideal

Source: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
NeurIPS 2020, section 5 (ideals).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from placer.solver import pipelines
from placer.solver.components import closed_groups, sources_and_readers
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction, joined
from placer.solver.values import arcs_of

MOST_IDEALS = 1_000
"""The most ideals: bounds need tables of all pairs of them, which take a second for each model."""

MOST_FOUND = 2_000
"""The most ideals from which the best ``MOST_IDEALS`` are chosen."""

Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class StageIdeals:
    """Where stages may begin and end.

    Attributes:
        members: by ideal and layer, whether it holds the layer. The first ideal is empty, the last
            one has all layers, and larger ones come later.
        is_complete: whether every plan is a chain of these ideals, except for layers that cost
            nothing.
        free: layers without costs and without inputs, which every other ideal holds.
        readers: by layer of ``free``, the layers that read it.
    """

    members: Bools
    is_complete: bool
    free: frozenset[int]
    readers: dict[int, frozenset[int]]

    def stages(self, chain: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the layers of each stage of a chain of ideals, each in the profile's order.

        Args:
            chain: indices of ideals, from the first to the last one.
        """
        held = [
            set(np.flatnonzero(self.members[end] & ~self.members[begin]).tolist()) - self.free
            for begin, end in pairwise(chain)
        ]
        # later layers first: a layer without costs may be read by another one
        for layer in sorted(self.free, reverse=True):
            reading = (stage for stage in held if stage & self.readers[layer])
            next(reading, held[0]).add(layer)
        return [tuple(sorted(stage)) for stage in held]


def stage_ideals(problem: Problem) -> StageIdeals:
    """Return the ideals of a problem; those with the least traffic at their end if they are many.

    Args:
        problem: with contiguous stages on alike devices.
    """
    readers = _readers(problem)
    # a limit on the number of layers is a cost of each layer
    has_free = problem.most_layers is None
    free = _free_layers(problem, readers) if has_free else frozenset[int]()
    dead = _dead_ends(problem, readers, free) if has_free else []
    nodes = joined(problem, closed_groups([*problem.groups, *dead]))
    found = _every_ideal(problem, nodes, free)
    is_complete = found is not None and len(found) <= MOST_IDEALS
    if found is None:
        ordered = ((1 << end) - 1 for end in range(len(nodes.nodes) + 1))
        found = sorted({ideal | _bits(nodes.holding(free)) for ideal in ordered if ideal} | {0})
    members = _members(nodes, found)
    if len(members) > MOST_IDEALS:
        members = _least_traffic(problem, members)
    return StageIdeals(members, is_complete, free, {layer: readers[layer] for layer in free})


def _readers(problem: Problem) -> list[frozenset[int]]:
    """Return, by layer, the layers that read its values."""
    found: list[set[int]] = [set() for _ in problem.layers]
    for value in problem.values:
        found[value.source].update(value.readers)
    return [frozenset(readers) for readers in found]


def _is_free(problem: Problem, index: int) -> bool:
    """Return whether a layer takes no time and no memory."""
    layer = problem.layers[index]
    sizes = (
        *(layer.param_bytes, layer.buffer_bytes, layer.grad_bytes, layer.optimizer_bytes),
        *(layer.saved_bytes, layer.forward_workspace_bytes, layer.backward_workspace_bytes),
    )
    times = problem.compute_ms(index, 0), pipelines.optimizer_ms(problem, index, 0)
    return not any(sizes) and not any(times)


def _free_layers(problem: Problem, readers: Sequence[frozenset[int]]) -> frozenset[int]:
    """Return the layers without costs, whose values have no bytes, and without other inputs."""
    grouped = {layer for group in problem.groups for layer in group}
    sized = {value.source for value in problem.values if value.bytes or value.gradient_bytes}
    fed: set[int] = set()
    found: set[int] = set()
    for layer in range(len(problem.layers)):
        is_one = layer not in fed | sized | grouped and readers[layer] and _is_free(problem, layer)
        if is_one:
            found.add(layer)
        else:
            fed |= readers[layer]
    return frozenset(found)


def _dead_ends(
    problem: Problem, readers: Sequence[frozenset[int]], free: frozenset[int]
) -> list[tuple[int, int]]:
    """Return pairs of a layer without costs that nobody reads, and the one layer that it reads."""
    arcs = ((source, layer) for source, layers in enumerate(readers) for layer in layers)
    sources, _ = sources_and_readers(len(readers), arcs)
    return [
        (read[0], layer)
        for layer, every in enumerate(sources)
        for read in [[source for source in every if source not in free]]
        if not readers[layer] and len(read) == 1 and _is_free(problem, layer)
    ]


def _bits(numbers: Iterable[int]) -> int:
    """Return the number that has these bits."""
    return sum(1 << number for number in numbers)


def _every_ideal(problem: Problem, nodes: Reduction, free: frozenset[int]) -> list[int] | None:
    """Return all ideals, with a bit for each node, or None if they are too many."""
    always = _bits(nodes.holding(free))
    needs = [always] * len(nodes.nodes)
    for source, reader in nodes.arcs(arcs_of(problem.values)):
        needs[reader] |= 1 << source
    others = [(1 << node, need) for node, need in enumerate(needs) if not always >> node & 1]
    found, last = {always}, [always]
    while last:
        last = list(
            {
                ideal | bit
                for ideal in last
                for bit, need in others
                if not ideal & bit and need & ~ideal == 0
            }
        )
        found.update(last)
        if len(found) > MOST_FOUND:
            return None
    # the first stage has more than layers without costs, if there are others
    return sorted((found - {always} if others else found) | {0}, key=int.bit_count)


def _members(nodes: Reduction, found: Sequence[int]) -> Bools:
    """Return, by ideal and layer, whether the ideal holds the layer."""
    size = -(-len(nodes.nodes) // 8)
    packed = b"".join(ideal.to_bytes(size, "little") for ideal in found)
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
    return bits.reshape(len(found), 8 * size)[:, list(nodes.node_of)].astype(np.bool_)


def _least_traffic(problem: Problem, members: Bools) -> Bools:
    """Return the ideals that the fewest bytes leave, one in each part with equal work."""
    work = members @ np.array([problem.compute_ms(layer, 0) for layer in range(members.shape[1])])
    traffic = np.zeros(len(members))
    for value in problem.values:
        leaves = members[:, value.source] & ~members[:, list(value.readers)].all(axis=1)
        traffic += (value.bytes + value.gradient_bytes) * leaves
    part = ((MOST_IDEALS - 2) * work / max(work[-1], 1e-9)).astype(int)
    inside = range(1, len(members) - 1)
    lightest = {part[index]: index for index in sorted(inside, key=lambda one: -traffic[one])}
    return np.asarray(members[sorted({0, len(members) - 1, *lightest.values()})])
