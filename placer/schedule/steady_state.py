r"""What a step takes where steps follow one another, as in a training loop, once they have settled.

A step takes over from the one before when devices, lanes and buffers are free (x), and hands the same on. Each of these
is the largest of sums of times. So, where (+) is the larger of two and (*) their sum, a step is a matrix::

    x(i + 1) = A (*) x(i)         A[j, k]: the longest chain of passes and transfers from k, where the step begins,
                                  to j, where it ends

From step to step the ends grow, in the mean, by the largest mean of a cycle of A: of a chain that
comes back to where it began, one step later or several. That is the time of a step in a row. Mostly
the longest chain is one step long; then each step takes as long as the next. Else several together
do, as many as the chain is long.

Of every x the entries of A (*) x - x enclose that mean: the largest is not below it, the smallest
not above. A few steps are played; mostly the two meet, or the largest meets what one device has to
do. Where they do not, the longest chains are followed, a step forward costing the mean that is
known, as long as there is one that comes back with more. Either way the time is exact, but for
rounding.

Source: Baccelli, Cohen, Olsder, Quadrat, "Synchronization and Linearity", 1992, chapter 3; Lawler,
"Combinatorial
Optimization: Networks and Matroids", 1976, section 3.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from placer.schedule.passes import Pipeline, Plan
from placer.schedule.simulate import StepsInARow

PLAYED = 6
"""So many steps are played in the hope that they settle."""

ROUNDING = 1e-12
"""Sums in another order differ by this share."""


def in_a_row_ms(pipeline: Pipeline, plan: Plan) -> float:
    """The time from the end of a step to that of the next, in milliseconds, once steps in a row
    have settled.

    It is exact: the mean over as many steps as the ends take to repeat. A step may begin before the
    one before has ended, see ``simulate``, so it is never more than what a step takes alone, the
    optimizer included.

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
    return _longest_mean(row, row.busiest_ms())


class _Traced(float):
    """A time with that from which the longest chain to it comes, of all that the step took over."""

    __slots__ = ("origin",)
    origin: int

    def __new__(cls, time_ms: float, origin: int) -> Self:
        made = super().__new__(cls, time_ms)
        made.origin = origin
        return made

    def __add__(self, time_ms: float) -> _Traced:
        return _Traced(float(self) + time_ms, self.origin)


class _Link(NamedTuple):
    """The last step of a longest chain: from where it comes, and how long it is."""

    origin: int
    time_ms: float


def _longest_mean(row: StepsInARow, mean: float) -> float:
    """The largest mean of a chain that comes back to where it began, at least the one that is
    known.
    """
    state = row.state
    links: dict[int, _Link] = {}
    while True:
        ends = _traced_step(row, state)
        slack = ROUNDING * max(map(abs, ends))
        later = {place: end for place, end in enumerate(ends) if end - mean > state[place] + slack}
        if not later:
            return mean
        links |= {
            place: _Link(end.origin, float(end) - state[end.origin]) for place, end in later.items()
        }
        for place, end in later.items():
            state[place] = float(end) - mean
        longer = _mean_of_a_round(links)
        if longer is not None:
            if longer <= mean:  # by rounding alone
                return mean
            mean, links = longer, {}


def _traced_step(row: StepsInARow, state: Sequence[float]) -> list[_Traced]:
    """What a step hands on that takes this over."""
    row.begin([_Traced(time_ms, place) for place, time_ms in enumerate(state)])
    row.play()
    # all are: each device, lane and buffer was used
    return [end for end in row.state if isinstance(end, _Traced)]


def _mean_of_a_round(links: Mapping[int, _Link]) -> float | None:
    """The mean of a chain that comes back to where it began; None if none does."""
    seen: dict[int, int] = {}
    for start in links:
        place = start
        while place in links and place not in seen:
            seen[place] = start
            place = links[place].origin
        if place in links and seen[place] == start:
            round_ms = [links[place].time_ms]
            after = links[place].origin
            while after != place:
                round_ms.append(links[after].time_ms)
                after = links[after].origin
            return sum(round_ms) / len(round_ms)
    return None
