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

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

PIECES = 4
"""Pieces of a stage. Nothing hides the reduction of the last one; more pieces leave less of it, but
each costs the host some graph launches and copies. Of the 2.8 GB of gradients of a GPT with 1.4
billion parameters in bf16, at 300 GB/s, four pieces leave about 2 ms."""

CROSSING_RATIO = 4
"""Bytes of values that may cross a border between pieces, for each byte of gradients in a piece.
The gradient of such a value is copied to the other piece. On H100s this moves about four times as
many bytes in a millisecond as replicas reduce and gather; over slower links a border is worth more.
The skip connections of a U-Net exceed it, the activations of a ResNet or a transformer do not."""

LANDINGS = 2
"""Pieces whose gradients may arrive from one replica at a time: one is added while the next one
comes."""

ADD_BYTES_PER_S = 2e12
"""Bytes per second of an addition of gradients, which reads two of them and writes one. It is about
60% of an H100's memory bandwidth. A device with slower memory has slower links, too, so additions
never take much of the time of a reduction."""


def gradient_pieces(grad_bytes: Sequence[int], crossing_bytes: Sequence[int]) -> list[range]:
    """Return the pieces of a stage, in the order in which their gradients are complete.

    Args:
        grad_bytes: the bytes of the gradients of each layer, in execution order.
        crossing_bytes: as for ``piece_starts``.

    Returns:
        For each piece the positions of its layers; nothing without gradients.
    """
    if not any(grad_bytes):
        return []
    ends = [0, *piece_starts(grad_bytes, crossing_bytes), len(grad_bytes)]
    return [range(*ends_of_piece) for ends_of_piece in reversed(list(pairwise(ends)))]


def piece_starts(grad_bytes: Sequence[int], crossing_bytes: Sequence[int]) -> list[int]:
    """Return the positions of the layers with which a further piece of a stage begins.

    They are nearest to equal shares of the bytes, as far as every piece has gradients: a piece
    without gradients would only cost passes. Of starts that are about as near, the one that the
    fewest bytes cross is taken. No start is more than one layer's gradients before its share, so
    that the first piece has at least one share less these.

    Args:
        grad_bytes: the bytes of the gradients of each layer, in execution order.
        crossing_bytes: for each layer, the bytes of the values that are made before it and read
            from it on. See ``CROSSING_RATIO``.
    """
    sums = list(accumulate(grad_bytes, initial=0))
    total, largest = sums[-1], max(grad_bytes, default=0)
    able = [
        place
        for place in range(1, len(grad_bytes))
        if PIECES * crossing_bytes[place] <= CROSSING_RATIO * total
    ]
    starts: set[int] = set()
    for number in range(1, PIECES):
        taken = {0, total, *(sums[start] for start in starts)}
        apart = {
            place: abs(PIECES * sums[place] - number * total)
            for place in able
            if sums[place] not in taken and PIECES * (sums[place] + largest) >= number * total
        }
        if apart:
            starts.add(
                min(
                    apart,
                    key=lambda place: (
                        max(total / 4, apart[place]),
                        crossing_bytes[place],
                        apart[place],
                    ),
                )
            )
    return sorted(starts)


def crossing_bytes(values: Iterable[tuple[int, int, int]], count: int) -> list[int]:
    """Return by layer the bytes of the values that are made before it and read from it on.

    Args:
        values: for each value its bytes, the positions of the layer that makes it and of
            its last reader.
        count: layers.
    """
    changes = [0] * (count + 1)
    for size, maker, reader in values:
        changes[maker + 1] += size
        changes[reader + 1] -= size
    return list(accumulate(changes))[:count]
