r"""A lower bound on the step of contiguous placements of any graph: the pipeline must fill.

In topological order some nodes come behind all nodes before them, and before all nodes behind them.
They cut the graph into blocks, whatever arcs bypass them::

            .-- c --.
    a -- b -|       |-- e -- f        blocks  a | b | c d | e | f
     \      '-- d --'       /
      '--------------------'

A device that holds nodes of two blocks holds all nodes between. So the stages follow one another
along the blocks, and two of them share a block at most in part. With n micro-batches, a stage that
begins in block k satisfies::

    way(k) + n * work  <=  step      way(k): one micro-batch's way there and back, through what
                                     comes before block k

If gradients come back the same way, it also waits for all passes behind the last block that it
holds any nodes of::

    way(k) + n * work + wait  <=  step                                         see ``wait_ms``

So the step is at least the smallest X for which K stages, each with work (X - way - wait) / n, can
hold all work, one after the other; no two share a block of one node. Times assume the fastest
devices, and transfers are left out. In a steady-state step, a stage's own passes and its slot (see
``gradient_exchange.py``) also count without a way::

    n * work + wait + slot  <=  step        wait and slot of a stage

Passes of its own shorten a stage's wait: as many are counted as its blocks have, at their
slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placer.schedule import in_flight
from placer.solver.bounds.simple_bounds import fastest_ms, longest_before
from placer.solver.problem import ROUNDING, SAME, Problem
from placer.solver.reduce import Reduction
from placer.solver.replicas.gradient_exchange import LayerMs, SlotBound
from placer.solver.values import arcs_of, gradient_arcs

Arcs = set[tuple[int, int]]
Vector = NDArray[np.float64]
Matrix = Sequence[Sequence[float]]

MOST_BLOCKS = 400
"""The most blocks, as every pair of blocks is evaluated; more are joined."""


def filling(problem: Problem, nodes: Reduction, awaited_ms: Matrix) -> float:
    """Return a lower bound on the passes of every contiguous placement, in milliseconds.

    It is 0 where nodes are tied to others behind them.

    Args:
        problem: the placement problem.
        nodes: its layers in nodes, in topological order.
        awaited_ms: by layer and device, what others wait for of a backward pass.
    """
    blocks = _blocks_of(problem, nodes, awaited_ms)
    if blocks is None:
        return 0.0
    # Two chains of waiting give two bounds. In the first, a stage waits for the way there and back,
    # without the weight gradients that nobody waits for. In the second, all work counts but only
    # the way there.
    ways_ms = blocks.there_ms + blocks.back_ms
    return max(
        blocks.row(problem, blocks.awaited_ms, ways_ms).least_step(),
        blocks.row(problem, blocks.passes_ms, blocks.there_ms).least_step(),
    )


def filling_of_steady_state(
    problem: Problem, nodes: Reduction, awaited_ms: Matrix, slot: SlotBound, known_ms: float
) -> float:
    """Return a lower bound on the steady-state step of every contiguous placement, in milliseconds.

    It is the known one where gradients do not come back through all nodes.

    Args:
        problem: the placement problem.
        nodes: its layers in nodes, in topological order.
        awaited_ms: by layer and device, what others wait for of a backward pass.
        slot: a bound on what devices do between two steps.
        known_ms: another lower bound; the result is not less.
    """
    blocks = _blocks_of(problem, nodes, awaited_ms)
    if blocks is None or blocks.waits is None:
        return known_ms
    # All passes that others wait for are between the first pass of the first stage and its last.
    # Another stage has its own passes alone between its first and its last; its slot follows.
    slots_ms = _by_node(nodes, fastest_ms(problem, matrix(problem, slot.layer_ms)))
    own_ms = blocks.passes_ms + _by_block(blocks.block_of, slots_ms) / problem.request.chunks
    own = blocks.row(problem, own_ms, np.zeros_like(own_ms))
    least = own.least_step(known_ms + slot.less_ms)
    ways_ms = blocks.there_ms + blocks.back_ms
    around = blocks.row(problem, blocks.awaited_ms, ways_ms)
    return around.least_step(least - slot.less_ms)


class _Blocks(NamedTuple):
    """The blocks of a graph.

    Attributes:
        block_of: by node, its block.
        is_whole: by block, whether it is one node.
        awaited_ms: by block, the passes that others wait for.
        passes_ms: by block, all passes.
        there_ms: by block, the shortest way there of a node of it or of a later one.
        back_ms: by block, the shortest way back.
        waits: stage by stage, by first block and last, how long it waits; None if gradients do not
            come back through all nodes.
    """

    block_of: list[int]
    is_whole: NDArray[np.bool_]
    awaited_ms: Vector
    passes_ms: Vector
    there_ms: Vector
    back_ms: Vector
    waits: list[Any] | None

    def row(self, problem: Problem, work_ms: Vector, way_ms: Vector) -> _Row:
        """Return stages along the blocks, by work and way of each."""
        return _Row(work_ms, way_ms, self.waits, problem, self.is_whole)


def _blocks_of(problem: Problem, nodes: Reduction, awaited_ms: Matrix) -> _Blocks | None:
    """Return the blocks of a contiguous graph; None where nodes are tied to others behind them."""
    arcs, count = nodes.arcs(arcs_of(problem.values)), len(nodes.nodes)
    if not problem.contiguous or any(reader < source for source, reader in arcs):
        return None
    block_of = _joined(_blocks(arcs, count))
    forward, backward, awaited = (
        _by_node(nodes, fastest_ms(problem, times))
        for times in (problem.forward_ms, problem.backward_ms, awaited_ms)
    )
    back = nodes.arcs(gradient_arcs(problem.values))
    waits = None
    if problem.training and _has_two_ends(back, count):
        behind_ms = _least_to(block_of, _behind(arcs, forward) + _behind(back, awaited))
        waits = _waits(problem, nodes, block_of, behind_ms)
    return _Blocks(
        block_of,
        np.bincount(block_of) == 1,
        _by_block(block_of, forward + awaited),
        _by_block(block_of, forward + backward),
        _least_from(block_of, _before(arcs, forward)),
        _least_from(block_of, _before(back, awaited)),
        waits,
    )


def matrix(problem: Problem, layer_ms: LayerMs) -> Matrix:
    """Return the time of each layer on each device."""
    devices = range(len(problem.devices))
    return [[layer_ms(layer, device) for device in devices] for layer in range(len(problem.layers))]


def wait_ms(problem: Problem, stages_left: int, behind: Any, forward: Any, backward: Any) -> Any:
    """Return the least idle time of a stage between its first and last pass of a step, in ms.

    Args:
        problem: the placement problem.
        stages_left: the number of stages from this one on.
        behind: one micro-batch's way from the stage's end to the last layer and back.
        forward: the stage's forward pass.
        backward: its backward pass.
    """
    chunks, schedule = problem.request.chunks, problem.request.schedule
    if not problem.training:
        return 0.0
    if schedule == "fill-drain":
        return behind
    # A free device fills the gap with weight-gradient passes, so only the wait for the first
    # gradient is certain.
    if schedule == "zero-bubble":
        room = in_flight(schedule, problem.most_devices, 0, chunks)
        return np.maximum(0.0, behind - (room - 1) * forward)
    #     stage   F1 F2 .. Fw  |wait(f)|  B1 F . B F .. |wait(b)|  B.. Bn
    #     behind     1 goes to the end and comes back        n does the same
    held = min(chunks, stages_left)
    first, last = (np.maximum(0.0, behind - (held - 1) * time) for time in (forward, backward))
    return first + last if chunks > stages_left else np.maximum(first, last)


def _has_two_ends(arcs: Arcs, count: int) -> bool:
    """Return whether each node but the first reads something, and each but the last is read."""
    return {reader for _, reader in arcs} == set(range(1, count)) and {s for s, _ in arcs} == set(
        range(count - 1)
    )


def _blocks(arcs: Arcs, count: int) -> list[int]:
    """Return, by node, its block.

    A node that comes behind all before it, and before all behind it, is one of its own.

    All nodes before one lead to it if each is read by one that is no farther; of those behind it
    likewise.
    """
    reader_of, source_of = [count] * count, [-1] * count  # the nearest ones
    for source, reader in arcs:
        reader_of[source] = min(reader_of[source], reader)
        source_of[reader] = max(source_of[reader], source)
    farthest = accumulate(reader_of[:-1], max, initial=0)  # of all before a node
    # of all behind it
    earliest = reversed([*accumulate(source_of[:0:-1], min, initial=count)])
    alone = [
        there <= node <= back
        for node, (there, back) in enumerate(zip(farthest, earliest, strict=True))
    ]
    # A block begins at each node that is alone, and right behind it.
    #    alone    0 1 0 0 1       begins   . 1 1 0 1       block   0 1 2 2 3
    begins = [here or before for here, before in pairwise([False, *alone])]
    return list(accumulate(map(int, begins[1:]), initial=0))


def _joined(block_of: list[int]) -> list[int]:
    """Return at most the allowed number of blocks, with equally many joined to each."""
    # Joining blocks loosens the bound but keeps it valid.
    together = -(-(block_of[-1] + 1) // MOST_BLOCKS)
    return [block // together for block in block_of]


def _by_node(nodes: Reduction, time_ms: Sequence[float]) -> Vector:
    return np.array([sum(time_ms[layer] for layer in layers) for layers in nodes.nodes])


def _by_block(block_of: Sequence[int], time_ms: Vector) -> Vector:
    return np.asarray(np.bincount(block_of, weights=time_ms), dtype=np.float64)


def _before(arcs: Arcs, time_ms: Vector) -> Vector:
    """Return, by node, the longest path that ends right before it."""
    return np.array(longest_before(time_ms.tolist(), sorted(arcs)))


def _behind(arcs: Arcs, time_ms: Vector) -> Vector:
    """Return, by node, the longest path that begins right behind it."""
    last = len(time_ms) - 1
    return _before({(last - reader, last - source) for source, reader in arcs}, time_ms[::-1])[::-1]


def _least_from(block_of: Sequence[int], way_ms: Vector) -> Vector:
    """Return, by block, the shortest way of any node of it or of a later one."""
    least = np.full(block_of[-1] + 1, np.inf)
    np.minimum.at(least, np.array(block_of), way_ms)
    return np.minimum.accumulate(least[::-1])[::-1]


def _least_to(block_of: Sequence[int], way_ms: Vector) -> Vector:
    """Return, by block, the shortest way of any node of it or of an earlier one."""
    last = block_of[-1]
    return _least_from([last - block for block in reversed(block_of)], way_ms[::-1])[::-1]


def _waits(
    problem: Problem, nodes: Reduction, block_of: Sequence[int], behind_ms: Vector
) -> list[Any]:
    """Return the least wait of each stage for what is behind it, by its first and last block."""

    def of_blocks(time_ms: Matrix) -> Vector:
        slowest = [
            max(row[device] for device in problem.allowed[layer])
            for layer, row in enumerate(time_ms)
        ]
        return _from_to(_by_block(block_of, _by_node(nodes, slowest)))

    forward, backward = of_blocks(problem.forward_ms), of_blocks(problem.backward_ms)
    if problem.may_recompute:
        backward = backward + forward
    stages_left = range(problem.most_devices, 0, -1)
    return [wait_ms(problem, left, behind_ms[None, :], forward, backward) for left in stages_left]


def _from_to(time_ms: Vector) -> Vector:
    """Return, by first block and last, the sum of all from the one to the other."""
    ends = np.cumsum(time_ms)
    return ends[None, :] - (ends - time_ms)[:, None]


class _Row:
    """Stages along the blocks.

    Args:
        work_ms: by block.
        way_ms: by block, of a stage that begins there.
        waits: stage by stage; None if nothing is known of them, so that it is all the same where
            they end.
        problem: the placement problem.
        is_whole: by block, whether it is one node, which no two stages share.
    """

    def __init__(
        self,
        work_ms: Vector,
        way_ms: Vector,
        waits: list[Any] | None,
        problem: Problem,
        is_whole: NDArray[np.bool_],
    ) -> None:
        self._chunks = problem.request.chunks
        self._is_whole = is_whole
        self._has_waits = waits is not None
        self._ends = np.cumsum(work_ms)
        self._starts = self._ends - work_ms
        # by first block and last, what a stage loses; by last block, what the stages up to it hold
        if waits is None:
            self._lost = [way_ms[:, None]] * problem.most_devices
            self._least, self._most = np.zeros((1, 1)), self._ends[None, -1:]
        else:
            forwards = np.tri(len(work_ms), dtype=bool).T
            self._lost = [np.where(forwards, way_ms[:, None] + wait, np.inf) for wait in waits]
            self._least, self._most = (
                self._starts[None, :] - ROUNDING * self._ends[-1],
                self._ends[None, :],
            )

    def least_step(self, known_ms: float = 0.0) -> float:
        """Return the smallest step for which the stages can hold the work of all blocks.

        Args:
            known_ms: a lower bound that is known; the result is not less.
        """
        low, high = known_ms, self._chunks * float(self._ends[-1])
        if low >= high or (low and self._holds_all(low * (1 + ROUNDING))):
            return low
        # `_reach` grows with the step, so bisection finds the smallest feasible one. `low` stays
        # infeasible, hence a lower bound.
        precision_ms = SAME * high
        while high - low > precision_ms:
            middle = (low + high) / 2
            if self._holds_all(middle):
                high = middle
            else:
                low = middle
        return low

    def _holds_all(self, step_ms: float) -> bool:
        return self._reach(step_ms) >= float(self._ends[-1]) * (1 - 1e-12)

    def _reach(self, step_ms: float) -> float:
        """Return the most work of the stages, each starting where the last ends or earlier."""
        reached, work_ms = 0.0, step_ms / self._chunks
        for lost in self._lost:
            # blocks that it may begin in, and end in: a stage holds no more than `work_ms`
            first = int(np.searchsorted(self._ends, reached - work_ms, side="right"))
            begin = slice(first, int(np.searchsorted(self._starts, reached, side="right")))
            end = slice(None)
            if self._has_waits:
                end = slice(first, int(np.searchsorted(self._starts, reached + work_ms, "right")))
            # Greedy: each stage starts where the previous one ended, or at the end of an earlier
            # block, and takes as much work as fits.
            begins = np.minimum(reached, self._ends[begin])[:, None]
            further = begins + (step_ms - lost[begin, end]) / self._chunks
            possible = (lost[begin, end] <= step_ms) & (further >= self._least[:, end])
            most = np.minimum(further, self._most[:, end])
            reached = self._whole_blocks(float(np.max(most, where=possible, initial=reached)))
        return reached

    def _whole_blocks(self, reached: float) -> float:
        """Return the same work without the part of a block that no two stages share."""
        block = int(np.searchsorted(self._starts, reached, side="right")) - 1
        start, end = float(self._starts[block]), float(self._ends[block])
        if not self._is_whole[block] or start == end:
            return reached
        return start if reached < end * (1 - ROUNDING) else max(reached, end)
