"""Pieces of a stage, whose gradients replicas reduce while the backward pass goes on.

A backward pass runs the layers of a stage in reverse, so the gradients of the last layers are
complete first. A stage is cut into a few pieces with about equally many bytes of gradients. The
gradients of a piece are reduced as soon as its backward pass is over::

    layers            l0   l1   l2   l3   l4   l5
    backward pass     <-------------------------      gradients of l5 are complete first
    pieces            [ piece 1 ]  [  piece 0  ]      piece 0 is reduced while l2 .. l0 still run

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020, section 3.2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

PIECES = 4
"""Pieces of a stage. Nothing hides the reduction of the last one; more pieces leave less of it, but
each costs the host some graph launches and copies. Of the 2.8 GB of gradients of a GPT with 1.4
billion parameters in bf16, at 300 GB/s, four pieces leave about 2 ms."""

LANDINGS = 2
"""Pieces whose gradients may arrive from one replica at a time: one is added while the next one
comes."""

ADD_BYTES_PER_S = 2e12
"""Bytes per second of an addition of gradients, which reads two of them and writes one. It is about
60% of an H100's memory bandwidth. A device with slower memory has slower links, too, so additions
never take much of the time of a reduction."""


def gradient_pieces(grad_bytes: Sequence[int]) -> list[range]:
    """Return the pieces of a stage, in the order in which their gradients are complete.

    Args:
        grad_bytes: the bytes of the gradients of each layer, in execution order.

    Returns:
        For each piece the positions of its layers; nothing without gradients.
    """
    if not any(grad_bytes):
        return []
    ends = [0, *piece_starts(grad_bytes), len(grad_bytes)]
    return [range(*ends_of_piece) for ends_of_piece in reversed(list(pairwise(ends)))]


def piece_starts(grad_bytes: Sequence[int], crossing: Sequence[int] | None = None) -> list[int]:
    """Return the positions of the layers with which a further piece of a stage begins.

    They are nearest to equal shares of the bytes, as far as every piece has gradients: a piece
    without gradients would only cost passes. Of starts that are about as near, one that few values
    cross is taken.

    Args:
        grad_bytes: the bytes of the gradients of each layer, in execution order.
        crossing: for each layer, how many values that are made before it are read from it on; None
            if only bytes count.
    """
    sums = list(accumulate(grad_bytes, initial=0))
    total = sums[-1]
    starts: set[int] = set()
    for number in range(1, PIECES):
        taken = {0, total, *(sums[start] for start in starts)}
        apart = {
            place: abs(PIECES * sums[place] - number * total)
            for place in range(1, len(grad_bytes))
            if sums[place] not in taken
        }
        if apart:
            starts.add(
                min(
                    apart,
                    key=lambda place: (
                        max(total / 4, apart[place]),
                        crossing[place] if crossing else 0,
                        apart[place],
                    ),
                )
            )
    return sorted(starts)
