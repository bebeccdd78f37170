"""Whole prices: those of nodes rounded to whole numbers, so that a share of them is the next whole number.

Where prices are whole, so is what a set is worth: of a sum of 31, with 6 devices, some device holds not 5.17 but 6. So
a sum of one more than a multiple of the devices proves most, and prices are rounded to that. Searches by whole prices
also keep few labels, as few sets differ in worth: what they say is exact.

Source: Chvátal, "Edmonds polytopes and a hierarchy of combinatorial problems", 1973; Fekete and Schepers, "New classes
of fast lower bounds for bin packing problems", 2001 (of rounded sizes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import floor

import numpy as np
from numpy.typing import NDArray

MOST_SCALE = 40
"""A set of the most load is worth about so much, at the most."""

Whole = NDArray[np.int64]


def whole_prices(prices: Sequence[float], devices: int, free: Callable[[Whole], int]) -> Iterator[tuple[Whole, int]]:
    """Prices rounded in several ways, and what some device that pays for transfers holds of them at the least.

    Args:
        prices: by node; a set of the most load is worth about one.
        devices: how many pay for transfers.
        free: what the other devices hold of whole prices at the most.
    """
    for scale in range(1, MOST_SCALE + 1):
        scaled = np.maximum(0.0, np.array(prices) * scale)
        rounded = np.floor(scaled + 0.5).astype(np.int64)
        for whole in (rounded, _trimmed(rounded, scaled, devices, free(rounded))):
            least = -((free(whole) - int(whole.sum())) // devices)
            if least > 0:
                yield whole, least


def _trimmed(rounded: Whole, scaled: NDArray[np.float64], devices: int, held: int) -> Whole:
    """One less for those that were rounded up the most, until the rest of a division by the devices is one."""
    surplus = (int(rounded.sum()) - held - 1) % devices
    order = np.argsort(scaled - rounded, kind="stable")
    trimmed = rounded.copy()
    trimmed[order[rounded[order] > 0][:surplus]] -= 1
    return trimmed


def whole_part(worth: float) -> int:
    """Of a worth that is known but for rounding: the largest whole number that it may be."""
    return floor(worth + 1e-6)
