"""The peak memory of inference for every interval of a linear order as one stage.

A table over first block and step says how many bytes the stage that begins with the block holds at
the step. It grows as one block after another joins. A value is held from the step at which it is
made until its last reader in the stage, or, where it is made in the stage, until its last reader
anywhere::

    v   s . . r1 . . . r2     r1 joins: v is held from s until r1 in the stages without s
        |------|-------|      r2 joins: there until r2, from r1 on, and from s in the stages
                              without r1

Steps follow the profile's order, whatever the linear order, so the peak equals the placement's
peak. Held bytes only grow. So a run of steps that a value spans keeps two numbers: how much was
added throughout, and the run's maximum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placer.solver.problem import Problem, Value

LEAST_RUN = 64
"""Steps up to which single steps are counted: a run of steps costs as much as so many."""


class _Hold(NamedTuple):
    """What some stages hold at some steps, once a block has joined them.

    Attributes:
        firsts: the stages, by first block.
        steps: from which until before which.
        size: in bytes.
    """

    firsts: slice
    steps: tuple[int, int]
    size: int


def inference_moments(problem: Problem, blocks: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Return, by first block and end, the values and workspace in bytes at the stage's peak.

    Args:
        problem: the placement problem, in inference.
        blocks: the layers of each block, in a topological order.
    """
    count = len(blocks)
    held = _Held(count, len(problem.layers))
    moments = np.zeros((count + 1, count + 1))
    for block, joined in enumerate(_joined(problem, blocks)):
        for hold in joined:
            held.add(hold)
        moments[:-1, block + 1] = held.worst
    return moments


class _Held:
    """The held bytes by first block and step, in runs of steps.

    Args:
        blocks: how many there are.
        steps: likewise.

    Attributes:
        worst: by first block, the most that is held at a step.
    """

    def __init__(self, blocks: int, steps: int) -> None:
        self.worst = np.zeros(blocks, np.int64)
        # Runs of about sqrt(steps) balance the two parts of `add`: whole runs and single steps.
        self._run = max(isqrt(steps), LEAST_RUN)
        runs = -(-steps // self._run)
        # Split of the held bytes at a step, so that a long hold touches few numbers:
        #    held[first, step] = _throughout[first, step // run] + _partly[first, step]
        #    _most[first, run]  = the maximum of held over the steps of the run
        self._throughout = np.zeros((blocks, runs), np.int64)
        self._partly = np.zeros((blocks, runs * self._run), np.int64)
        self._most = np.zeros((blocks, runs), np.int64)

    def add(self, hold: _Hold) -> None:
        """Count a hold; its whole runs at once."""
        firsts, (begin, end), run = hold.firsts, hold.steps, self._run
        first, last = begin // run, (end - 1) // run
        self._add_within(firsts, first, begin, min(end, (first + 1) * run), hold.size)
        if last > first:
            self._add_within(firsts, last, last * run, end, hold.size)
        if last > first + 1:
            self._throughout[firsts, first + 1 : last] += hold.size
            most = self._most[firsts, first + 1 : last]
            most += hold.size
            self._raise(self.worst[firsts], most.max(axis=1))

    def _add_within(self, firsts: slice, run: int, begin: int, end: int, size: int) -> None:
        """Add the bytes of a hold at some steps of a run."""
        here = self._partly[firsts, begin:end]
        here += size
        most = here.max(axis=1) + self._throughout[firsts, run]
        self._raise(self._most[firsts, run], most)
        self._raise(self.worst[firsts], most)

    @staticmethod
    def _raise(known: NDArray[np.int64], most: NDArray[np.int64]) -> None:
        np.maximum(known, most, out=known)


def _joined(problem: Problem, blocks: Sequence[Sequence[int]]) -> list[list[_Hold]]:
    """Return, by block, what its joining adds."""
    block_of = {layer: block for block, layers in enumerate(blocks) for layer in layers}
    joined: list[list[_Hold]] = [[] for _ in blocks]
    for step, layer in enumerate(problem.layers):
        block, size = block_of[step], layer.forward_workspace_bytes
        if size:
            joined[block].append(_Hold(slice(0, block + 1), (step, step + 1), size))
    for value in problem.values:
        for block, hold in _holds(value, block_of) if value.held_bytes else ():
            joined[block].append(hold)
    return joined


def _holds(value: Value, block_of: dict[int, int]) -> Iterator[tuple[int, _Hold]]:
    """Return the bytes that a value adds as blocks join, each with its block."""
    last_step = {block_of[reader]: reader for reader in value.readers}
    last_step[block_of[value.source]] = value.readers[-1]
    # from a first block on, until which step; the later the block, the shorter
    held: list[tuple[int, int]] = []
    begin = 0
    for block, until in sorted(last_step.items()):
        held.append((begin, value.source - 1))
        begin = end = block + 1
        # `held` is a stack with decreasing `until`. The joining block extends the entries that end
        # earlier, and each extension is one rectangle of stages and steps.
        while held and held[-1][1] < until:
            first, known = held.pop()
            yield block, _Hold(slice(first, end), (known + 1, until + 1), value.held_bytes)
            end = first
        held.append((end, until))
