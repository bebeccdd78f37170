"""The smallest piece of memory that is enough, where only a trial tells how much is taken beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

TRIALS = 5
"""They find the piece to one part in fifty of what is taken without one."""

LEAST_SHARE = 0.4
"""No piece smaller than this share of what is taken without one is tried."""

WORTH_BYTES = 64 * 2**20
"""What takes less is left as it is."""

_SEGMENT_BYTES = 2 * 2**20
_BESIDE_SHARE = 0.02
"""Small tensors always lie beside the piece, so that so much of it beside it does not tell that it is too small."""


def fit(taken: Callable[[Sequence[int]], Sequence[int]], without: Sequence[int]) -> list[int]:
    """By pass, the piece with which it takes the least, in bytes; 0: none.

    Args:
        taken: given the piece of each pass, what each then takes in all.
        without: what each takes without a piece.
    """
    least, best = list(without), [0] * len(without)
    enough, scarce = list(least), [int(LEAST_SHARE * size) for size in least]
    worth = [size >= WORTH_BYTES for size in least]
    for _ in range(TRIALS if any(worth) else 0):
        middles = [(low + high) // 2 for low, high in zip(scarce, enough, strict=True)]
        tried = [-(-size // _SEGMENT_BYTES) * _SEGMENT_BYTES * pays for size, pays in zip(middles, worth, strict=True)]
        for index, (piece, size) in enumerate(zip(tried, taken(tried), strict=True)):
            if worth[index] and size < least[index]:
                best[index], least[index] = piece, size
            if size - piece > _BESIDE_SHARE * piece:
                scarce[index] = piece
            else:
                enough[index] = piece
    return best
