r"""A lower bound on the step of contiguous placements of any graph, from the time that it takes to fill the pipeline.

In the topological order of the nodes some are passed by every path. They cut the graph into blocks::

            .-- c --.
    a -- b -|       |-- e -- f        blocks  a | b | c d | e | f
            '-- d --'

A device that holds nodes of two blocks holds all of those between, so the stages follow one another along the blocks,
two of them sharing a block at most in part. With n micro-batches a stage that begins in block k takes::

    way(k) + n * work  <=  step          way(k): one micro-batch's way there and back, through what comes before block k

So the step is at least the smallest X for which K stages, each with work (X - way) / n, can hold all work, one after
the other. Times are those of the fastest devices, transfers are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from placer.solver.bounds import fastest_ms, longest_paths
from placer.solver.problem import Problem, arcs_of
from placer.solver.reduce import Reduction

Arcs = set[tuple[int, int]]

HALVINGS = 60


def filling(problem: Problem, nodes: Reduction, awaited_ms: Sequence[Sequence[float]]) -> float:
    """No contiguous placement's passes take less, in milliseconds; 0 where the graph has several ends.

    Args:
        problem: what is asked.
        nodes: its layers in nodes, in topological order.
        awaited_ms: by layer and device, what others wait for of a backward pass.
    """
    arcs = nodes.arcs(arcs_of(problem.values))
    if not problem.contiguous or not _has_two_ends(arcs, len(nodes.nodes)):
        return 0.0
    block_of = _blocks(arcs, len(nodes.nodes))
    forward, backward, awaited = (
        _by_node(nodes, fastest_ms(problem, times)) for times in (problem.forward_ms, problem.backward_ms, awaited_ms)
    )
    there = _before(arcs, forward)
    back = _before(nodes.arcs(_gradient_arcs(problem)), awaited)
    ways = [one + other for one, other in zip(_least_from(block_of, there), _least_from(block_of, back), strict=True)]
    held = [one + other for one, other in zip(forward, awaited, strict=True)]
    whole = [one + other for one, other in zip(forward, backward, strict=True)]
    chunks, stages = problem.request.chunks, problem.most_devices
    return max(
        _least(_by_block(block_of, held), ways, chunks, stages),
        _least(_by_block(block_of, whole), _least_from(block_of, there), chunks, stages),
    )


def _gradient_arcs(problem: Problem) -> list[tuple[int, int]]:
    return [(value.source, reader) for value in problem.values if value.gradient_bytes for reader in value.readers]


def _has_two_ends(arcs: Arcs, count: int) -> bool:
    """Whether each node but the first reads something, and something reads each but the last."""
    return {reader for _, reader in arcs} == set(range(1, count)) and {s for s, _ in arcs} == set(range(count - 1))


def _blocks(arcs: Arcs, count: int) -> list[int]:
    """By node, its block; a node that no arc goes past is one, and so are those between two such."""
    passed = [0] * (count + 1)
    for source, reader in arcs:
        passed[source + 1] += 1
        passed[reader] -= 1
    alone = [number == 0 for number in accumulate(passed[:count])]  # the first one is
    begins = [here or before for here, before in pairwise([False, *alone])]
    return list(accumulate(map(int, begins[1:]), initial=0))


def _by_node(nodes: Reduction, time_ms: Sequence[float]) -> list[float]:
    return [sum(time_ms[layer] for layer in layers) for layers in nodes.nodes]


def _by_block(block_of: Sequence[int], time_ms: Sequence[float]) -> list[float]:
    total = [0.0] * (block_of[-1] + 1)
    for block, time in zip(block_of, time_ms, strict=True):
        total[block] += time
    return total


def _before(arcs: Arcs, time_ms: Sequence[float]) -> list[float]:
    """By node, the longest path that ends right before it."""
    paths = longest_paths(range(len(time_ms)), time_ms, sorted(arcs))
    return [path - time for path, time in zip(paths, time_ms, strict=True)]


def _least_from(block_of: Sequence[int], way_ms: Sequence[float]) -> list[float]:
    """By block, the shortest way to any node of it or of a later one."""
    least = [float("inf")] * (block_of[-1] + 1)
    for block, way in zip(block_of, way_ms, strict=True):
        least[block] = min(least[block], way)
    return list(accumulate(reversed(least), min))[::-1]


def _least(work_ms: Sequence[float], way_ms: Sequence[float], chunks: int, stages: int) -> float:
    """The smallest step for which so many stages can hold the work of all blocks."""
    ends = list(accumulate(work_ms))
    low, high = 0.0, chunks * ends[-1] + way_ms[-1]
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _reach(ends, way_ms, chunks, stages, middle) >= ends[-1] * (1 - 1e-12):
            high = middle
        else:
            low = middle
    return low


def _reach(ends: Sequence[float], way_ms: Sequence[float], chunks: int, stages: int, step_ms: float) -> float:
    """How much work the stages can hold at the most: each begins where the one before ends, or earlier."""
    reached = 0.0
    for _ in range(stages):
        block = next((block for block, end in enumerate(ends) if end >= reached), len(ends) - 1)
        begins = [*zip(ends[:block], way_ms[:block], strict=True), (reached, way_ms[block])]
        further = max(begin + max(0.0, step_ms - way) / chunks for begin, way in begins)
        if further <= reached:
            break
        reached = further
    return reached
