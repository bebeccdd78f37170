r"""What a step takes where steps follow one another, as in a training loop, once they have settled.

A step takes over from the one before when devices, lanes and buffers are free (x), and hands the same on. Each of these
is the largest of sums of times. So, where (+) is the larger of two and (*) their sum, a step is a matrix::

    x(i + 1) = A (*) x(i)         A[j, k]: the longest chain of passes and transfers from k, where the step begins,
                                  to j, where it ends

From step to step the ends grow, in the mean, by the largest mean of a cycle of A: of a chain that comes back to where
it began, one step later or several. That is the time of a step in a row. Mostly the longest chain is one step long;
then each step takes as long as the next. Else several together do, as many as the chain is long.

Of every x the entries of A (*) x - x enclose that mean: the largest is not below it, the smallest not above. A few
steps are played; mostly the two meet, or the largest meets what one device has to do. Where they do not, the mean is
taken from A itself. Either way it is exact, but for rounding.

Source: Baccelli, Cohen, Olsder, Quadrat, "Synchronization and Linearity", 1992, chapter 3; Karp, "A characterization of
the minimum cycle mean in a digraph", 1978.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from placer.schedule.passes import Pipeline, Plan
from placer.schedule.simulate import StepsInARow

PLAYED = 6
"""So many steps are played in the hope that they settle."""

ROUNDING = 1e-12
"""Sums in another order differ by this share."""


def in_a_row_ms(pipeline: Pipeline, plan: Plan) -> float:
    """The time from the end of a step to that of the next, in milliseconds, once steps in a row have settled.

    It is exact: the mean over as many steps as the ends take to repeat. A step may begin before the one before has
    ended, see ``simulate``, so it is never more than what a step takes alone, the optimizer included.

    Args:
        pipeline: the stages' times, the optimizer's included, and what passes between them.
        plan: the order of passes.
    """
    row = StepsInARow(pipeline, plan)
    least, before = row.busiest_ms(), row.state
    for _ in range(PLAYED):
        row.play()
        after = row.state
        grown = [new - old for new, old in zip(after, before, strict=True)]
        least, most = max(least, min(grown)), max(grown)
        if most <= least * (1 + ROUNDING):
            return most
        before = after
    return _largest_cycle_mean(_matrix(row))


def _matrix(row: StepsInARow) -> NDArray[np.float64]:
    """A: what a step hands on, by what it takes over alone."""
    columns = []
    count = len(row.state)
    for start in range(count):
        row.begin([0.0 if place == start else -inf for place in range(count)])
        row.play()
        columns.append(row.state)
    return np.array(columns).T


def _largest_cycle_mean(weights: NDArray[np.float64]) -> float:
    """The largest mean weight of an arc in any cycle.

    Karp's theorem, w(k, v) being the heaviest walk of k arcs that ends at v, of n in all: the largest over v of the
    smallest over k < n of (w(n, v) - w(k, v)) / (n - k).
    """
    count = len(weights)
    walks = [np.zeros(count)]
    for _ in range(count):
        walks.append((weights + walks[-1]).max(axis=1))
    reached = np.isfinite(walks[count])  # every device comes back to itself
    last = walks[count][reached]
    return float(np.min([(last - walk[reached]) / (count - k) for k, walk in enumerate(walks[:count])], axis=0).max())
