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
each needs passes of its own."""

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
        For each piece the positions of its layers; nothing without gradients. The cuts are those
        nearest to equal shares of the bytes, as far as every piece has gradients.
    """
    sums = list(accumulate(grad_bytes, initial=0))
    total = sums[-1]
    if not total:
        return []
    cuts: set[int] = set()
    for number in range(1, PIECES):
        apart = {
            place: abs(PIECES * sums[place] - number * total)
            for place in range(1, len(grad_bytes))
            if sums[place] not in (0, total, *(sums[cut] for cut in cuts))
        }
        if apart:
            cuts.add(min(apart, key=lambda place: (apart[place], place)))
    ends = [0, *sorted(cuts), len(grad_bytes)]
    return [range(*ends_of_piece) for ends_of_piece in reversed(list(pairwise(ends)))]
