"""The worst moment of inference for every interval of a linear order as one stage.

A table over first block and step says what is held at the step in the stage that begins with the block, and it grows as
one block after another joins: a value is held from when it is made until the last reader that is there, or, where it is
made there, until the last of all::

    v   s . . r1 . . . r2        r1 joins: v is held from s until r1 in the stages without s
        |------|-------|         r2 joins: there until r2, from r1 on, and from s in the stages without r1

Steps are those of the profile, whatever the order, so that the moment is that of the placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placer.solver.problem import Problem, Value


class _Hold(NamedTuple):
    """What some stages hold at some steps, once a block has joined them.

    Attributes:
        firsts: the stages, by first block.
        steps: at which.
        size: in bytes.
    """

    firsts: slice
    steps: slice
    size: int


def inference_moments(problem: Problem, blocks: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """By first block and end, what a stage between holds of values and workspace at its worst moment, in bytes.

    Args:
        problem: what is asked, in inference.
        blocks: the layers of each block, in a topological order.
    """
    count = len(blocks)
    held = np.zeros((count, len(problem.layers)), np.int64)
    worst = np.zeros(count, np.int64)
    moments = np.zeros((count + 1, count + 1))
    for block, joined in enumerate(_joined(problem, blocks)):
        for firsts, steps, size in joined:
            here = held[firsts, steps]
            here += size
            np.maximum(worst[firsts], here.max(axis=1), out=worst[firsts])
        moments[:-1, block + 1] = worst
    return moments


def _joined(problem: Problem, blocks: Sequence[Sequence[int]]) -> list[list[_Hold]]:
    """By block, what its joining adds."""
    block_of = {layer: block for block, layers in enumerate(blocks) for layer in layers}
    joined: list[list[_Hold]] = [[] for _ in blocks]
    for step, layer in enumerate(problem.layers):
        block, size = block_of[step], layer.forward_workspace_bytes
        if size:
            joined[block].append(_Hold(slice(0, block + 1), slice(step, step + 1), size))
    for value in problem.values:
        for block, hold in _holds(value, block_of) if value.held_bytes else ():
            joined[block].append(hold)
    return joined


def _holds(value: Value, block_of: dict[int, int]) -> Iterator[tuple[int, _Hold]]:
    """What a value adds as blocks join, each with its block."""
    last_step = {block_of[reader]: reader for reader in value.readers}
    last_step[block_of[value.source]] = value.readers[-1]
    held: list[tuple[int, int]] = []  # from a first block on, until which step; the later the block, the shorter
    begin = 0
    for block, until in sorted(last_step.items()):
        held.append((begin, value.source - 1))
        begin = end = block + 1
        while held and held[-1][1] < until:
            first, known = held.pop()
            yield block, _Hold(slice(first, end), slice(known + 1, until + 1), value.held_bytes)
            end = first
        held.append((end, until))
