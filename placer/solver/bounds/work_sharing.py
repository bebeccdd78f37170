r"""Bounds from sharing work: the least bottleneck if nodes could be cut anywhere at no cost.

With t(n, d) the time of node n on device d and any rates r(d) >= 0, the bottleneck T of every
placement satisfies::

    T * sum of r(d) over devices  >=  sum of r(d) * load(d)
                                  >=  sum over nodes n of min over d of r(d) * t(n, d)

The price of a node is its part of the right side over the sum of rates. With the best rates, prices
add up to the value of a linear program, by duality. With any other rates they add up to less, so no
rounding of the rates makes a bound wrong.

Source: Lawler and Labetoulle, "On preemptive scheduling of unrelated parallel processors by linear
programming", 1978.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf, isfinite

from ortools.linear_solver import pywraplp

from placer.solver.problem import Problem
from placer.solver.reduce import Reduction

Owners = Sequence[tuple[int, Sequence[float]]]
"""How many devices are alike, and by node what each takes; infinite where it may not be."""

MOST_TIMES = 50_000
"""Pairs of a node and a kind of device above which the linear program takes over a second."""


def prices_of_work(owners: Owners) -> list[float]:
    """Return, by node, its part of the least bottleneck.

    Args:
        owners: kinds of devices; each node may be on some.
    """
    rates = _rates(tuple((count, tuple(times)) for count, times in owners))
    in_all = sum(count * rate for (count, _), rate in zip(owners, rates, strict=True))
    return [part / in_all for part in _parts(owners, rates)]


def least_work(
    problem: Problem,
    nodes: Reduction,
    time_ms: Callable[[int, int], float],
    aside_ms: Sequence[float] = (),
) -> float:
    """Return the least work and waiting of the busiest device, in the unit of ``time_ms``.

    Args:
        problem: the placement problem.
        nodes: its layers, joined where they must be together; each may be on some device.
        time_ms: of a layer on a device.
        aside_ms: each device that is used waits for one of these, each for another one; the least
            first. None where none waits.
    """
    columns: Counter[tuple[float, ...]] = Counter()
    for alike in problem.alike_devices():
        column = (
            sum(time_ms(layer, alike[0]) for layer in layers) if alike[0] in allowed else inf
            for layers, allowed in zip(nodes.nodes, nodes.allowed, strict=True)
        )
        columns[tuple(column)] += len(alike)
    owners = tuple((count, times) for times, count in columns.items())
    least: float = max(min(times) for times in zip(*columns, strict=True))
    # the latter are the best where all are used and none waits
    for rates in {(1.0,) * len(owners), _rates(owners)}:
        by_device = [
            rate for (count, _), rate in zip(owners, rates, strict=True) for _ in range(count)
        ]
        least = max(
            least, _shared(sum(_parts(owners, rates)), by_device, aside_ms, problem.most_devices)
        )
    return least * (1 - 1e-12)  # sums in another order round differently


def _shared(whole: float, rates: Sequence[float], aside_ms: Sequence[float], most: int) -> float:
    """Return the least bottleneck of some devices, from the nodes' worth and the devices' rates."""
    rising = sorted(rates)
    least = inf
    # Which devices are used is unknown. The smallest rates above and the largest rates below the
    # fraction line give the least value, so it bounds every choice. Of all pairings, the largest
    # rate with the shortest wait gives the smallest sum.
    for used in range(1, most + 1):
        aside = sum(
            rate * time for rate, time in zip(reversed(rising[:used]), aside_ms, strict=False)
        )
        least = min(least, (whole + aside) / sum(rising[-used:]))
    return least


def _parts(owners: Owners, rates: Sequence[float]) -> list[float]:
    """Return, by node, what it is worth where it is worth least."""
    columns = [
        [rate * time if isfinite(time) else inf for time in times]
        for (_, times), rate in zip(owners, rates, strict=True)
    ]
    return [min(parts) for parts in zip(*columns, strict=True)]


@lru_cache(maxsize=8)  # schedules differ in what is waited for, mostly not in the work
def _rates(owners: tuple[tuple[int, tuple[float, ...]], ...]) -> tuple[float, ...]:
    """Return, by kind, what a millisecond of one of its devices is worth.

    All the same where that is not to be known.
    """
    alike = (1.0,) * len(owners)
    if len(owners) == 1 or sum(len(times) for _, times in owners) > MOST_TIMES:
        return alike
    # minimise T  subject to  sum over d of part(n, d) >= 1 for every node n,
    #                         sum over n of t(n, d) * part(n, d) <= count(d) * T for every kind d.
    # The duals of the second rows are the best rates r(d).
    solver = pywraplp.Solver.CreateSolver("GLOP")
    longest = solver.NumVar(0, solver.infinity(), "")
    solver.Minimize(longest)
    once = [solver.Constraint(1, solver.infinity()) for _ in owners[0][1]]
    done = []
    for count, times in owners:
        done.append(solver.Constraint(-solver.infinity(), 0))
        done[-1].SetCoefficient(longest, -count)
        for row, time in zip(once, times, strict=True):
            if isfinite(time):
                part = solver.NumVar(0, solver.infinity(), "")
                row.SetCoefficient(part, 1)
                done[-1].SetCoefficient(part, time)
    if solver.Solve() != solver.OPTIMAL:
        return alike
    # GLOP may return duals slightly above 0. Any rates >= 0 give a valid bound, so clip them.
    rates = tuple(max(0.0, -row.dual_value()) for row in done)
    return rates if any(rates) else alike
