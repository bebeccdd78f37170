"""Search for contiguous placements of small bottleneck: thresholds that are met or refuted.

A threshold asks less than the optimum: does any placement have a bottleneck of at most T? The
smaller T is, the more nodes must be together and the fewer stages each node can be at. So a
threshold well below the best known placement is refuted quickly, and raises the bound. A sweep
first asks for anything better, also in parts (``redivision.py``), then halves the open interval::

    bound ├────────────┼──────┼───┼──────────────┤ best known
                   2. no    4. ? 3. ?          1. ?     so the bound is the T of 2., until the
                                                        next sweep
"""

from __future__ import annotations

from itertools import count
from math import inf

from placer.solver.contiguous import ideals
from placer.solver.contiguous.merges import merged
from placer.solver.contiguous.redivision import divide_anew
from placer.solver.contiguous.stage_program import StageModel
from placer.solver.cpsat.runner import Answer
from placer.solver.reduce import Reduction, reduced
from placer.solver.search import Search

FIRST, TIMES = 2.5, 4.0
"""The work of the first sweep's questions, in the measure of ``cpsat.Meter``, and of each next
one's over that."""

STEP = 0.01
"""Thresholds of a sweep are this share of the best known apart, at the least."""

CLOSER = 0.004
"""The same of thresholds that ideals are asked for, which are quick to fail."""

MOST_TRIES = 2
"""So many thresholds of which ideals are too many are tried in a row."""

CUT_SHORT = 0.9
"""The share of its work that a question did at the least if it was cut short."""

ASKED = 2
"""How often a sweep asks for anything better, where it finds that."""

LOOSE, SHORT = 0.2, 1.0
"""Where the gap is more than this share, a question of so much work is asked before parts are made
better."""

GROUP_SHARE = 0.08
"""How much of a question's work goes to each group of stages that is divided anew."""

BETTER_SHARE = 0.3
"""How much of a question's work goes to the best placement, where the question has found one that
is better."""


def few_ideals(search: Search) -> None:
    """Solve a problem whose ideals are few; leave others as they are.

    The smaller the threshold the fewer ideals there are: where they are too many, smaller ones are
    asked for. A chain that is found is the best of all, one that is not raises the bound.
    """
    threshold, tries = search.better(), 0
    while _worth_chains(search, threshold) and tries < MOST_TRIES and not search.over(1.0):
        nodes = nodes_within(search, threshold)
        if ideals.too_loose(search.problem, nodes):
            search.too_many = threshold
            return
        chain = ideals.best_chain(
            search.problem, nodes, threshold, search.meter, lambda: search.over(1.0)
        )
        if chain is None:
            search.too_many, tries = threshold, tries + 1
        elif chain.devices is None:
            tries = 0
            search.prove(search.nothing_below() if threshold == search.better() else threshold)
            if len(nodes.nodes) == 1:
                # no ideals are needed to tell so; more orders find better thresholds sooner
                return
        else:
            search.prove(min(chain.bound, search.nothing_below()))
            search.offer(chain.devices, "ideals")
            search.too_many = 0.0  # what is left open is more than ideals know
        threshold = (search.bound + search.too_many) / 2


def _worth_chains(search: Search, threshold: float) -> bool:
    """Return whether ideals may tell more about a threshold than is known."""
    if search.best is None or not search.open() or not ideals.applies(search.problem):
        return False
    return search.bound < threshold < search.too_many * (1 - CLOSER)


def sweep(search: Search) -> None:
    """Go on until the best is proven, time or work is over, or nothing more can be learnt.

    Args:
        search: with a placement, or with a bottleneck that will do; of a problem that
            ``stage_scope.applies`` to. parts: whether some stages are looked at alone, too.
    """
    for turn in count():
        if not search.open() or search.over(1.0):
            return
        work = FIRST * TIMES**turn
        known, done = (search.value, search.bound), search.meter.done
        loose = search.value - search.bound > LOOSE * search.value
        _anything_better(search, SHORT if loose else work)
        if search.open():
            _groups_anew(search, work)
        if search.open() and loose:
            _anything_better(search, work)
        if search.open():
            few_ideals(search)
        if search.open() and not search.over(1.0):
            halve(search, work)
        if known == (search.value, search.bound) and search.meter.done - done < CUT_SHORT * work:
            # no question was cut short: asked again, each has the same answer, which costs do not
            # bear out
            return


def _groups_anew(search: Search, work: float) -> None:
    """Better placements from parts of the best known, which are quicker to place than all is."""
    divide_anew(search, nodes_within(search), GROUP_SHARE * work)


def _anything_better(search: Search, work: float) -> None:
    """Ask whether any placement is better than the best known, and improve it if one is."""
    for _ in range(ASKED):
        if (
            not search.open()
            or search.over(1.0)
            or _within(search, search.better(), work).devices is None
        ):
            return
        if search.open():
            model = StageModel(search.problem, nodes_within(search), search.better())
            answer = model.solve(search.limits(BETTER_SHARE * work))
            search.prove(search.nothing_below() if answer.infeasible else answer.bound)
            search.offer(answer.devices, "integer program")


def halve(search: Search, work: float) -> None:
    """Thresholds between what is proven and what is known or was too hard.

    Args:
        search: with a placement, of a problem that ``stage_scope.bounds``.
        work: of each question, in the measure of ``cpsat.Meter``.
    """
    hard = search.better()
    while search.open() and hard - search.bound > STEP * search.value and not search.over(1.0):
        threshold = (search.bound + hard) / 2
        if not _within(search, threshold, work).infeasible:
            hard = search.better() if search.value <= threshold else threshold


def _within(search: Search, threshold: float, work: float) -> Answer:
    """Return whether a placement is within a threshold; what is found or proven is the search's."""
    nodes = nodes_within(search, threshold)
    answer = StageModel(search.problem, nodes, threshold, any_will_do=True).solve(
        search.limits(work)
    )
    if answer.infeasible:
        search.prove(search.nothing_below() if threshold == search.better() else threshold)
    search.offer(answer.devices, "integer program")
    return answer


def nodes_within(search: Search, threshold: float | None = None) -> Reduction:
    """Return the layers in as few nodes as a placement within a threshold, or a better one, has."""
    upper = search.better() if threshold is None else threshold
    if search.request.objective != "throughput" or not 0 < upper < inf:
        return search.nodes
    if search.merged is None or search.merged[0] != upper:
        nodes = merged(
            search.problem, reduced(search.problem, upper), upper, lambda: search.over(1.0)
        )
        search.merged = upper, nodes
    return search.merged[1]
