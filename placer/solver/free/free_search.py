"""Free placements: the search around the integer program.

pair search ─▶ column generation ─▶ integer program ─▶ pair search,        ─┐
divides what   lower bound          a first look       column generation,  │
two devices                                            for longer          │
hold                                                                       ▼
      integer program, other rounds ◀─ column generation ◀─ integer program, a first round

Where pairs of devices cannot be judged alone, a few devices redivide their nodes with the integer
program (``neighbourhood_search.py``), also between its rounds.

With few nodes, the placement of the pair search is mostly the best. It is then proven right away,
by column generation with large groups and a first look of the integer program.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf
from typing import NamedTuple

from placer.schema.base import PROVEN_GAP
from placer.solver.cpsat.model import PlacementModel, worth_building
from placer.solver.free import neighbourhood_search, pair_search, set_graph
from placer.solver.free.column_generation import GROUPS, share_bound
from placer.solver.free.pair_search import PairSearch
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction, reduced
from placer.solver.search import Search


class _Ends(NamedTuple):
    """Shares of the time, or of the work, at which phases end.

    Attributes:
        pairs_of_few: the pair search, of few nodes.
        pairs: the pair search, of many nodes.
        pairs_at_last: the same while it still finds better placements.
        proof_of_few: a proof right after the pair search, of few nodes.
        coarse_prices: bounds by prices of large groups.
        redivision: large neighbourhood search, if the pair search does not apply or numbers of
            devices or layers are limited.
        redivision_between: the same between rounds of the integer program.
        pairs_again: the continued pair search.
        prices: bounds by prices of small groups.
        brief: share of the remaining time, or work, of a brief look of the integer program.
        brief_work: the most work of it.
    """

    pairs_of_few: float = 0.05
    pairs: float = 0.15
    pairs_at_last: float = 0.3
    proof_of_few: float = 0.1
    coarse_prices: float = 0.5
    redivision: float = 0.45
    redivision_between: float = 0.7
    pairs_again: float = 0.65
    prices: float = 0.8
    brief: float = 0.1
    brief_work: float = 3.0


ENDS = _Ends()


MANY_OPTIONS = 500
"""Pairs of a node and a device from which the integer program needs longer than local search."""


IDLE_ROUNDS = 5
"""Rounds without improvement that show that the pair search finds no more."""

COARSE, FINE = (GROUPS, GROUPS), (2 * GROUPS, inf)
"""Numbers of groups of nodes per device, at first and at last."""


def before_the_program(search: Search) -> None:
    """Improve the best start: redivide pairs of devices, and prove bounds."""
    pairs = _pairs(search)
    if has_many_nodes(search.problem, search.nodes):
        divided = _divide_pairs(search, pairs, ENDS.pairs, ENDS.pairs_at_last)
    else:
        divided = _divide_pairs(search, pairs, ENDS.pairs_of_few)
        _share_out(search, COARSE, ENDS.proof_of_few)
        # Where nodes are few, the integer program mostly proves the best.
        if _may_prove(search, ENDS.proof_of_few) and not set_graph.worth_looking(
            search.problem, search.nodes
        ):
            look(search)
    if (
        search.open()
        and not (divided and search.problem.any_numbers)
        and has_many_nodes(search.problem, search.nodes)
    ):
        _redivide(search, ENDS.redivision)
    _share_out(search, COARSE, ENDS.coarse_prices)
    # The integer program proves in a second what takes prices long, and the other way round.
    if _may_share(search, ENDS.prices):  # else it comes next, for longer
        look(search)
    if divided:
        _divide_pairs(search, pairs, ENDS.pairs_again)
    _share_out(search, FINE, ENDS.prices)
    if divided and not worth_building(search.problem, search.nodes, search.left_s()):
        _divide_pairs(search, pairs, 1.0)  # there is no integer program to come


def has_many_nodes(problem: Problem, nodes: Reduction) -> bool:
    """Return whether the integer program of all devices takes long for so many nodes."""
    return len(nodes.nodes) * len(problem.devices) >= MANY_OPTIONS


def _pairs(search: Search) -> PairSearch | None:
    """Return the search that divides what two devices hold, where it can judge that."""
    if (
        search.best is None
        or not search.open()
        or not pair_search.applies(search.problem, search.nodes)
    ):
        return None
    return PairSearch(search.problem, reduced(search.problem, search.value))


def _divide_pairs(
    search: Search, pairs: PairSearch | None, share: float, longest: float = 0.0
) -> bool:
    """Redivide the nodes of pairs of devices; return whether that could be judged.

    Args:
        search: the search for which it runs.
        pairs: the pair search to continue; None where it does not apply.
        share: the share of time or work at which it ends.
        longest: the share at which it ends if it still finds better placements.
    """
    if pairs is None or search.best is None or not search.open():
        return False
    searched = pairs

    def over(work: float) -> bool:
        return search.counted(work, share) and (
            searched.idle >= IDLE_ROUNDS or search.over(longest)
        )

    enough = search.bound * (1 + PROVEN_GAP / 2)
    found = pairs.improved(search.best, over, enough)
    search.offer(found, "local search")
    return found is not None


def _share_out(search: Search, groups: tuple[int, float], share: float) -> None:
    """Prove a bound, or that nothing is better, with this many groups of nodes per device."""
    if _may_share(search, share):
        upper, over = search.better(), partial(search.counted, share=share)
        bound = share_bound(
            search.problem, reduced(search.problem, upper), upper, search.bound, over, groups
        )
        search.prove(search.nothing_below() if bound >= upper else bound)


def look(search: Search) -> None:
    """Run the integer program for a tenth of the time that is left, or until its work is done."""
    upper, nodes = search.better(), reduced(search.problem, search.value)
    time_s = ENDS.brief * search.left_s()
    if worth_building(search.problem, nodes, time_s):
        limits = search.limits(min(ENDS.brief_work, ENDS.brief * search.meter.left))
        result = PlacementModel(search.problem, nodes, upper=upper).solve(
            replace(limits, time_s=time_s)
        )
        search.prove(search.nothing_below() if result.infeasible else result.bound)
        search.offer(result.devices, "integer program")


def _may_share(search: Search, share: float) -> bool:
    """Return whether sets that devices could hold may prove something, and there is time."""
    possible = set_graph.applies(search.problem) and set_graph.worth_looking(
        search.problem, search.nodes
    )
    return possible and _may_prove(search, share)


def _may_prove(search: Search, share: float) -> bool:
    """Return whether something is to be proven of the best so far, and there is time."""
    return search.best is not None and search.open() and not search.over(share)


def between_rounds(search: Search) -> None:
    """Redivide a few devices and prove bounds, between rounds of the program."""
    _redivide(search, ENDS.redivision_between)
    _share_out(search, COARSE, ENDS.prices)
    _share_out(search, FINE, ENDS.prices)


def _redivide(search: Search, share: float) -> None:
    """Let a few devices redivide their nodes, until a share of the time or the work is over."""
    is_free = not search.problem.contiguous and search.request.objective == "throughput"
    if is_free and search.best is not None and search.enough is None:
        found = neighbourhood_search.redivided(
            search.problem, search.best, search.quietly, lambda: search.over(share)
        )
        search.offer(found, "local search")
