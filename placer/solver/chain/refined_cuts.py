"""Refinement of cuts of long linear orders: finer runs near the borders of a known cut.

``optimal_cuts.py`` cuts long orders between runs of nodes. Here a known cut is improved with runs
that are finer the nearer they are to one of its borders, down to single nodes, so that borders move
together, far and little::

    nodes    . . . . . . . . . . . . . . . . | . . . . . . . . . . . . . .
    runs     |       |       |   |   | |.|.|.|.|.| | |   |   |       |

The number of runs doubles each time while time is left, until each node is a run if they are few
enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from math import inf, isqrt
from time import monotonic

from placer.solver.chain import optimal_cuts
from placer.solver.nets import exchanges
from placer.solver.problem import ROUNDING, Problem
from placer.solver.reduce import Reduction

MOST_RUNS = 2048
"""The most runs of nodes in a refined cut."""

MOST_WORK = 600_000_000
"""The most numbers that a cut computes, one or two seconds."""

MOST_CELLS = 50_000_000
"""The most numbers in the tables of a cut, 400 MB."""

NARROWER = 4
"""Shrinking factor of a border's neighbourhood from cut to cut."""


def finer_cuts(
    problem: Problem, nodes: Reduction, devices: Sequence[int] | None, left_s: Callable[[], float]
) -> Iterator[optimal_cuts.Cut]:
    """Yield better and better cuts; none if the order has few nodes, each a run of its own.

    Args:
        problem: the placement problem, contiguity understood.
        nodes: its layers in nodes, in topological order.
        devices: by layer, its device, in a cut of that order; None where none was found.
        left_s: the time that is left.
    """
    count, borders = len(nodes.nodes), _borders(nodes, devices) if devices else []
    number = optimal_cuts.runs_at_first(problem)
    if count <= number or len(borders) >= len(problem.devices):
        return
    exchanged, best, most = exchanges(problem, nodes), inf, _most_runs(problem)
    reach, next_s = count // (len(borders) + 1), 0.0
    while next_s < left_s():
        began = monotonic()
        runs = _runs(problem, nodes, borders, number, reach)
        cut = optimal_cuts.cut_of_blocks(problem, nodes, runs, exchanged)
        next_s = monotonic() - began
        better = cut.devices is not None and cut.value < best * (1 - ROUNDING)
        if cut.devices is not None and (better or cut.bound):
            best, borders = cut.value, _borders(nodes, cut.devices)
            yield cut
        if number >= count:
            return
        larger = max(number, min(2 * number, most))
        if larger > number and next_s * (larger / number) ** 2 < left_s():
            number, next_s = larger, next_s * (larger / number) ** 2
        elif not better and _step_count(number, borders, reach) < reach:
            reach = max(reach // NARROWER, 1)
        elif not better:
            return


def _most_runs(problem: Problem) -> int:
    """Return how many runs may be looked at, by the work and the room that it takes."""
    flights = min(problem.request.chunks, problem.most_devices) if problem.training else 1
    tables = len(optimal_cuts.device_classes(problem)[0]) * flights
    by_work = isqrt(MOST_WORK // optimal_cuts.choices_of_devices(problem))
    return min(MOST_RUNS, by_work, isqrt(MOST_CELLS // tables), MOST_CELLS // len(problem.layers))


def _borders(nodes: Reduction, devices: Sequence[int]) -> list[int]:
    """Return the nodes that are on another device than the one before."""
    held = [devices[layers[0]] for layers in nodes.nodes]
    return [node for node in range(1, len(held)) if held[node] != held[node - 1]]


def _step_count(number: int, borders: Sequence[int], reach: int) -> int:
    """Return how many runs may end on each side of a border; without borders, ``reach``."""
    return max((number // len(borders) - 1) // 2, 1) if borders else reach


def _runs(
    problem: Problem, nodes: Reduction, borders: Sequence[int], number: int, reach: int
) -> list[list[int]]:
    """Return about ``number`` runs of nodes, which are finer near the borders.

    Args:
        problem: the placement problem.
        nodes: its layers in nodes, in topological order.
        borders: the nodes with which runs of the known cut begin; empty for even runs.
        number: of runs.
        reach: the largest distance from a border at which a run may end.
    """
    count = len(nodes.nodes)
    if number >= count or not borders:
        return optimal_cuts.even_runs(problem, nodes, range(count), number)
    steps = _steps(reach, _step_count(number, borders, reach))
    ends = {border + step for border in borders for step in (0, *steps, *(-step for step in steps))}
    inside = sorted(end for end in ends if 0 < end < count)
    return [list(range(*run)) for run in itertools.pairwise((0, *inside, count))]


def _steps(reach: int, most: int) -> list[int]:
    """Return at most so many distances up to ``reach``, the near ones close together.

    All where there are few.
    """
    most = min(max(most, 1), reach)
    return [max(place, int(reach ** (place / most))) for place in range(1, most + 1)]
