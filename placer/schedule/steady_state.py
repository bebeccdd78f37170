"""The steady-state time of a step in a training loop.

A step starts from the times x at which devices, lanes and buffers became free, and leaves new ones.
Each new time is the maximum of sums of times. So, with (+) for the maximum and (*) for the sum, a
step is a matrix product in max-plus algebra::

    x(i + 1) = A (*) x(i)         A[j, k]: the longest chain of passes and transfers from k, at the
                                  step's start, to j, at its end

Over many steps the times grow, on average, by the largest cycle mean of A: the mean time per step
of a chain that returns to its origin after one or more steps. This is the steady-state time of a
step. Usually the critical cycle spans one step, and all steps take equally long. If it spans
several, the pattern repeats after that number of steps.

For every x, the smallest and the largest entry of A (*) x - x enclose the cycle mean. A few steps
are simulated; usually the two bounds meet, or the upper one meets the work of the busiest device.
Otherwise the largest cycle mean is found by following longest chains, with the known mean
subtracted from each step, until no cycle has a larger mean. Either way the time is exact up to
rounding.

Source: Baccelli, Cohen, Olsder, Quadrat, "Synchronization and Linearity", 1992, chapter 3; Lawler,
"Combinatorial Optimization: Networks and Matroids", 1976, section 3.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from placer.schedule.passes import Pipeline, Plan
from placer.schedule.simulate import StepsInARow

PLAYED = 6
"""Steps simulated before the exact method; usually enough for the bounds to meet."""

ROUNDING = 1e-12
"""Relative tolerance for sums in a different order."""


def steady_state_ms(pipeline: Pipeline, plan: Plan) -> float:
    """Return the steady-state time from the end of a step to the end of the next, in ms.

    This is exact: the mean over the steps after which the pattern repeats. A step may begin before
    the previous one has ended, see ``simulate``; so it is never more than the time of an isolated
    step with its optimizer.

    Args:
        pipeline: the stages' times, the optimizer included, and the transfers between them.
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
    """A time that remembers which initial time its longest chain started from."""

    __slots__ = ("origin",)
    origin: int

    def __new__(cls, time_ms: float, origin: int) -> Self:
        made = super().__new__(cls, time_ms)
        made.origin = origin
        return made

    def __add__(self, time_ms: float) -> _Traced:
        return _Traced(float(self) + time_ms, self.origin)


class _Link(NamedTuple):
    """The last step of a longest chain: its origin and its length."""

    origin: int
    time_ms: float


def _longest_mean(row: StepsInARow, mean: float) -> float:
    """Return the largest cycle mean, given one that is known to be reached."""
    state = row.state
    links: dict[int, _Link] = {}
    while True:
        ends = _traced_step(row, state)
        slack = ROUNDING * max(map(abs, ends))
        # times that still grow faster than the mean lie on or behind a cycle with a larger mean
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
    """Return the times after a step from this state, with their origins."""
    row.begin([_Traced(time_ms, place) for place, time_ms in enumerate(state)])
    row.play()
    # all entries are _Traced, since each device, lane and buffer was used
    return [end for end in row.state if isinstance(end, _Traced)]


def _mean_of_a_round(links: Mapping[int, _Link]) -> float | None:
    """Return the mean of a cycle in the chain of links; None if there is no cycle."""
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
