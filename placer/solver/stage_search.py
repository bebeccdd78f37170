"""Contiguous placements by objective throughput: thresholds, each met by a placement or proven to be out of reach.

A threshold asks less than the best: whether any placement has a bottleneck of no more than T. The smaller T, the more
nodes must be together and the fewer stages a node can be at, so that one well below the best placement that is known is
refuted in no time, and raises the bound. A sweep asks for anything better first, then halves what is open::

    bound ├────────────┼──────┼───┼──────────────┤ best known
                   2. no    4. ? 3. ?          1. ?        so the bound is the T of 2., until the next sweep
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from placer.solver import ideals
from placer.solver.convex_knots import some_node_has_no_stage
from placer.solver.cpsat import Answer
from placer.solver.merges import merged
from placer.solver.reduce import Reduction, reduced
from placer.solver.stages import StageModel

if TYPE_CHECKING:
    from placer.solver.solve import Search

SWEEPS = (1.0, 4.0, 16.0, 64.0)
"""The work of a sweep's questions, in the measure of ``cpsat.Meter``; the last is asked again and again."""

STEP = 0.01
"""Thresholds of a sweep are this share of the best known apart, at the least."""

GLANCE = 0.3
"""The work after which the stages of single nodes are looked at: a quicker proof of some questions that are hard."""


def few_ideals(search: Search) -> None:
    """Solve a problem whose ideals are few; leave others as they are."""
    if search.best is None or search.better() <= 0 or not ideals.applies(search.problem):
        return
    chain = ideals.best_chain(search.problem, _nodes(search, search.better()))
    if chain is not None:
        search.prove(min(chain.bound, search.nothing_below()))
        search.offer(chain.devices, "ideals")


def sweep(search: Search) -> None:
    """Go on until the best is proven, or time or work is over.

    Args:
        search: with a placement, or with a bottleneck that will do; of a problem that ``stage_scope.applies`` to.
    """
    for turn, work in enumerate(_works()):
        _anything_better(search, work)
        if turn == 1 and search.open():
            search.climb()
        if search.open() and not search.over(1.0):
            _halve(search, work)
        if not search.open() or search.over(1.0):
            return


def _works() -> Iterator[float]:
    yield from SWEEPS
    while True:
        yield SWEEPS[-1]


def _anything_better(search: Search, work: float) -> None:
    """Whether any placement is better than the best known; where one is, the best that so much work finds."""
    answer = _within(search, search.better(), work)
    if answer.devices is not None and search.open():
        model = StageModel(search.problem, _nodes(search, search.better()), search.better())
        answer = model.solve(search.limits(work))
        search.prove(search.nothing_below() if answer.infeasible else answer.bound)
        search.offer(answer.devices, "integer program")


def _halve(search: Search, work: float) -> None:
    """Thresholds between what is proven and what is known or was too hard."""
    hard = search.better()
    while search.open() and hard - search.bound > STEP * search.value and not search.over(1.0):
        threshold = (search.bound + hard) / 2
        answer = _within(search, threshold, work)
        if not answer.infeasible:
            hard = search.better() if answer.devices is not None else threshold


def _within(search: Search, threshold: float, work: float) -> Answer:
    """Whether a placement is within a threshold; what is found or proven is the search's."""
    nodes = _nodes(search, threshold)
    model = StageModel(search.problem, nodes, threshold, any_will_do=True)
    answer = model.solve(search.limits(min(work, GLANCE)))
    if not answer.complete and some_node_has_no_stage(search.problem, nodes, threshold, search.limits(work)):
        answer = Answer(None, 0.0, infeasible=True, complete=True)
    elif not answer.complete:
        answer = model.solve(search.limits(work))
    if answer.infeasible:
        search.prove(search.nothing_below() if threshold == search.better() else threshold)
    search.offer(answer.devices, "integer program")
    return replace(answer, bound=0.0)


def _nodes(search: Search, upper: float) -> Reduction:
    return merged(search.problem, reduced(search.problem, upper), upper)
