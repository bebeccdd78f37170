"""Free placements: the search around the integer program.

counts ─▶ pairs ────────────▶ local search ─▶ shares ─▶ integer program, a round ─▶ parts, shares ─▶ its other rounds
a bound   better by dividing  by small moves  a bound                               better by dividing
          anew what two hold                                                        anew what a few hold

Where pairs cannot be told, parts come after local search too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from placer.solver import answer, local, pair_search, parts, set_graph
from placer.solver.counting import count_bound
from placer.solver.reduce import reduced
from placer.solver.shares import share_bound

if TYPE_CHECKING:
    from placer.solver.solve import Search

PAIRS_SHARE = 0.15
"""How much of the time, or of the work, may be over when the search that divides pairs anew ends."""

LOCAL_SHARE, BRIEF_SHARE = 0.15, 0.05
"""The same of local search, and where nodes are many and pairs have been divided."""

PARTS_SHARE, BETWEEN_SHARE = 0.45, 0.7
"""The same of the search that divides anew what a few devices hold: before the integer program, between its rounds."""

SHARES_SHARE = 0.8
"""The same of the search for prices that prove a bound."""


def before_the_program(search: Search) -> None:
    """Go on from the best start: a bound, pairs divided anew, small moves where there is time left, a better bound."""
    _count(search)
    divided, many = search.open() and _divide_pairs(search), parts.many(search.problem, search.nodes)
    if search.open():
        move_layers(search, BRIEF_SHARE if divided and many else LOCAL_SHARE)
    if search.open() and not divided and many:
        _divide(search, PARTS_SHARE)
    share_out(search)


def _divide_pairs(search: Search) -> bool:
    """What two devices hold, divided between them as well as can be; whether that could be told."""
    if search.best is None or not pair_search.applies(search.problem, search.nodes):
        return False
    enough = search.bound * (1 + answer.PROVEN_GAP / 2)
    nodes = reduced(search.problem, search.value)
    found = pair_search.improved(search.problem, nodes, search.best, _told(search, PAIRS_SHARE), enough)
    search.offer(found, "local search")
    return found is not None


def move_layers(search: Search, share: float) -> None:
    """Local search from the best so far, until a share of the time or the work is over."""
    if search.best is None or not local.applies(search.problem):
        return

    def over() -> bool:
        search.meter.done += local.WORK
        return search.over(share)

    enough = search.bound * (1 + answer.PROVEN_GAP / 2)
    search.offer(local.improved(search.problem, search.nodes, search.best, over, enough), "local search")


def _count(search: Search) -> None:
    """Prove a bound by heavy nodes of which some device holds several."""
    if _may_share(search, PAIRS_SHARE):
        upper = search.value
        search.prove(count_bound(search.problem, reduced(search.problem, upper), upper, _told(search, PAIRS_SHARE)))


def share_out(search: Search) -> None:
    """Prove a bound, or that nothing is better than the best."""
    if _may_share(search, SHARES_SHARE):
        upper, over = search.better(), _told(search, SHARES_SHARE)
        bound = share_bound(search.problem, reduced(search.problem, upper), upper, search.bound, over)
        search.prove(search.nothing_below() if bound >= upper else bound)


def _may_share(search: Search, share: float) -> bool:
    """Whether something is to be proven by the sets that devices could hold, and there is time."""
    if search.best is None or not search.open() or search.over(share):
        return False
    return set_graph.applies(search.problem) and set_graph.worth_looking(search.problem, search.nodes)


def _told(search: Search, share: float) -> Callable[[float], bool]:
    """Counts work, and tells whether a share of it, or of the time, is over."""

    def over(work: float) -> bool:
        search.meter.done += work
        return search.over(share)

    return over


def divide_anew(search: Search) -> None:
    """Between rounds of the program: parts are divided anew, and shares may prove what is better by now."""
    _divide(search, BETWEEN_SHARE)
    share_out(search)


def _divide(search: Search, share: float) -> None:
    """What a few devices hold, divided among them as well as can be, until a share of the time or the work is over."""
    if search.best is not None and search.enough is None and parts.applies(search.problem):
        found = parts.improved(search.problem, search.best, search.quietly, lambda: search.over(share))
        search.offer(found, "local search")
