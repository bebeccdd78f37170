"""A search order by order of classes (``class_orders.py``): what no order has a chain within is proven.

    best known  ├── a a b b ✗ ── a b a b: a better one ──┤ next orders are asked for less ── b a b a ✗ ──▶ proven

A chain may be better than the placement that is made of it, as its cost is that of the best links its values may have,
and of memory it counts the state alone. Its order is then asked again for what is better than the best known, which may
tell where its values' ends are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from placer.solver import class_orders, costs
from placer.solver.class_orders import ClassOrders, Order
from placer.solver.stage_search import nodes_within

if TYPE_CHECKING:
    from placer.solver.solve import Search

ROUNDS = 3
"""So often an order is asked for something better, at the most."""

LOW = 0.9
"""So much of the best known is asked for first: that no order has less is told soon, for where the time is short."""

FEW = 500
"""With more nodes than so many that is not told soon, and left out."""

SHARE = 0.9
"""How much of the time all orders may take: it is all or nothing, as one order that is left open is one too many."""


def search_orders(search: Search) -> bool:
    """Go through all orders; whether each of them was answered.

    Args:
        search: with a placement, of a problem that ``class_orders.applies`` to.
    """
    asked = _likely_first(search, class_orders.orders(search.problem))
    bounds = dict.fromkeys(asked, search.bound)
    low = [LOW] if len(search.nodes.nodes) <= FEW else []
    for share in (*low, *[1.0] * ROUNDS):
        known = dict(bounds)
        if not _ask(search, bounds, share):
            return False
        least = min(bounds.values())
        search.prove(search.nothing_below() if least >= search.better() else least)
        if not search.open() or (bounds == known and share == 1.0):
            break
    return True


def _ask(search: Search, bounds: dict[Order, float], share: float) -> bool:
    """Ask each order that may have something better for it; whether each was answered.

    Args:
        search: as above.
        bounds: by order, what is proven of it, which is raised.
        share: of a bottleneck that is better, what is asked for.
    """
    given: ClassOrders | None = None
    for order, bound in bounds.items():
        upper = share * search.better()
        if bound >= upper or not search.open():
            continue
        if given is None or given.upper > upper:
            given = ClassOrders(search.problem, nodes_within(search, upper), upper)
        chain = None if search.over(SHARE) else given.best(order, lambda: search.over(SHARE))
        if chain is None:
            return False
        search.meter.done += chain.work
        bounds[order] = max(bound, min(chain.bound, upper))
        search.offer(chain.devices, "ideals")
    return True


def _likely_first(search: Search, orders: Sequence[Order]) -> list[Order]:
    """Orders that are most like that of the best placement first."""
    assert search.best is not None
    result = costs.evaluate(search.problem, search.best)
    assert result is not None  # it was found, so it can be
    kind_of = {device: kind for kind, alike in enumerate(search.problem.alike_devices()) for device in alike}
    best = [kind_of[device] for device in result.stages]

    def unlike(order: Order) -> int:
        return sum(one != other for one, other in zip(order, best, strict=False))

    return sorted(orders, key=unlike)
