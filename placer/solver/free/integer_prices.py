"""Integer prices: prices of nodes rounded to integers, so that shares round up to integers.

Where prices are integers, so is the worth of a set: of a sum of 31, with 6 devices, some device
holds 6 rather than 5.17. So a sum of one more than a multiple of the devices proves most, and
prices are rounded to that. Searches with integer prices also keep few labels, as few sets differ in
worth, and their results are exact.

Source: Chvátal, "Edmonds polytopes and a hierarchy of combinatorial problems", 1973; Fekete and
Schepers, "New classes of fast lower bounds for bin packing problems", 2001, for rounded sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import floor

import numpy as np
from numpy.typing import NDArray

MOST_SCALE = 40
"""The largest integer worth of a set of full load: larger ones take many labels."""

Whole = NDArray[np.int64]


def whole_prices(
    prices: Sequence[float], shares: Sequence[tuple[int, float]], free: Callable[[Whole], int]
) -> Iterator[tuple[Whole, list[int]]]:
    """Yield prices rounded in several ways, with each kind's least share of them.

    Args:
        prices: by node; a set of the most load is worth about one.
        shares: by kind of the devices that pay for transfers, their number, and the most that each
            holds.
        free: returns the most that the other devices hold of integer prices.
    """
    for scale in range(1, MOST_SCALE + 1):
        scaled = np.maximum(0.0, np.array(prices) * scale)
        rounded = np.floor(scaled + 0.5).astype(np.int64)
        held, surplus = _less_than_all(rounded, shares, free)
        trimmed = _trimmed(rounded, scaled, surplus)
        for whole, most in ((rounded, held), (trimmed, _less_than_all(trimmed, shares, free)[0])):
            if surplus >= 0:
                yield whole, [one + 1 for one in most]


def _less_than_all(
    whole: Whole, shares: Sequence[tuple[int, float]], free: Callable[[Whole], int]
) -> tuple[list[int], int]:
    """Return, by kind, what each device may hold so that all hold less than there is.

    And by how much it is more than one less.

    What is left over is negative where nothing needs to be held.
    """
    left = int(whole.sum()) - free(whole) - 1
    each = left / sum(count * share for count, share in shares)
    held = [max(0, whole_part(each * share)) for _, share in shares]
    left -= sum(count * most for (count, _), most in zip(shares, held, strict=True))
    for kind in sorted(range(len(shares)), key=lambda kind: held[kind] - each * shares[kind][1]):
        if shares[kind][0] <= left:
            held[kind], left = held[kind] + 1, left - shares[kind][0]
    return held, left


def _trimmed(rounded: Whole, scaled: NDArray[np.float64], surplus: int) -> Whole:
    """Return the prices with one less for the nodes that were rounded up the most."""
    order = np.argsort(scaled - rounded, kind="stable")
    trimmed = rounded.copy()
    trimmed[order[rounded[order] > 0][:surplus]] -= 1
    return trimmed


def whole_part(worth: float) -> int:
    """Return the largest integer that a worth with rounding errors may be."""
    return floor(worth + 1e-6)
