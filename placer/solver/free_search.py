"""Free placements: the search around the integer program.

pairs ────────────▶ local search ─▶ shares ─▶ integer program, a round ─▶ parts, shares ─▶ its other rounds
better by dividing  by small moves  a bound                               better by dividing
anew what two hold                                                        anew what a few hold

Where pairs cannot be told, parts come after local search too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from placer.solver import answer, local, pair_search, parts, shares
from placer.solver.reduce import reduced

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
    """Go on from the best start: pairs divided anew, small moves where there is time left, and a bound."""
    divided, many = _divide_pairs(search), parts.many(search.problem, search.nodes)
    if search.open():
        move_layers(search, BRIEF_SHARE if divided and many else LOCAL_SHARE)
    if search.open() and not divided and many:
        _divide(search, PARTS_SHARE)
    share_out(search)


def _divide_pairs(search: Search) -> bool:
    """What two devices hold, divided between them as well as can be; whether that could be told."""
    if search.best is None or not pair_search.applies(search.problem, search.nodes):
        return False

    def over(work: float) -> bool:
        search.meter.done += work
        return search.over(PAIRS_SHARE)

    enough = search.bound * (1 + answer.PROVEN_GAP / 2)
    nodes = reduced(search.problem, search.value)
    found = pair_search.improved(search.problem, nodes, search.best, over, enough)
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


def share_out(search: Search) -> None:
    """Prove a bound, or that nothing is better than the best."""
    if search.best is None or not search.open() or search.over(SHARES_SHARE) or not shares.applies(search.problem):
        return
    if not shares.worth_looking(search.problem, search.nodes):
        return

    def over(work: float) -> bool:
        search.meter.done += work
        return search.over(SHARES_SHARE)

    upper = search.better()
    bound = shares.share_bound(search.problem, reduced(search.problem, upper), upper, search.bound, over)
    search.prove(search.nothing_below() if bound >= upper else bound)


def divide_anew(search: Search) -> None:
    """Between rounds of the program: parts are divided anew, and shares may prove what is better by now."""
    _divide(search, BETWEEN_SHARE)
    share_out(search)


def _divide(search: Search, share: float) -> None:
    """What a few devices hold, divided among them as well as can be, until a share of the time or the work is over."""
    if search.best is not None and search.enough is None and parts.applies(search.problem):
        found = parts.improved(search.problem, search.best, search.quietly, lambda: search.over(share))
        search.offer(found, "local search")
