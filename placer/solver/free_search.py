"""Free placements: the search around the integer program.

local search ─▶ parts ─────────▶ shares ─▶ integer program, a round ─▶ parts, shares ─▶ its other rounds
better by       better by        a bound
small moves     dividing anew what
                a few devices hold
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from placer.solver import answer, local, parts, shares
from placer.solver.reduce import reduced

if TYPE_CHECKING:
    from placer.solver.solve import Search

LOCAL_SHARE = 0.15
"""How much of the time, or of the work, may be over when local search ends."""

PARTS_SHARE, BETWEEN_SHARE = 0.45, 0.7
"""The same of the search that divides anew what a few devices hold: before the integer program, between its rounds."""

SHARES_SHARE = 0.8
"""The same of the search for prices that prove a bound."""


def before_the_program(search: Search) -> None:
    """Go on from the best start: small moves, larger ones where nodes are many, and a bound."""
    move_layers(search)
    if search.open() and parts.many(search.problem, search.nodes):
        _divide(search, PARTS_SHARE)
    share_out(search)


def move_layers(search: Search) -> None:
    """Local search from the best so far."""
    if search.best is None or not local.applies(search.problem):
        return

    def over() -> bool:
        search.meter.done += local.WORK
        return search.over(LOCAL_SHARE)

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
