"""A search over orders of device classes (``class_orders.py``), which proves what no order allows.

    best known  ├── a a b b ✗ ── a b a b: a better one ──┤ the next orders are asked for less
                                                         └── b a b a ✗ ──▶ proven

A chain may be better than its placement, as its cost assumes the best links that its values may
have. Its order is then asked again for something better than the best known. Memory counts by sums
first. Where it does not allow the placement, or only with recomputation, it counts exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from placer.solver import costs
from placer.solver.bounds import memory_bounds
from placer.solver.contiguous import class_orders, stage_program
from placer.solver.contiguous.class_orders import Chain, ClassOrders, Memory, Order
from placer.solver.contiguous.stage_search import SWEEP, has_wide_gap, nodes_within
from placer.solver.problem import Problem
from placer.solver.reduce import reduced
from placer.solver.search import Search


class _Ends(NamedTuple):
    """Shares of the time at which the search over orders ends.

    Attributes:
        orders: by default: it is all or nothing, as one open order prevents the proof.
        enough: where a bottleneck suffices, as the integer program may find one within it, too.
    """

    orders: float = 0.9
    enough: float = 0.5


ENDS = _Ends()


GROWTH_FACTORS = (1.2, 1.5, 2.0, 3.0, 5.0)
"""Multiples of the bound that are tried in turn where no placement is known."""


def none_in_any_order(search: Search) -> bool:
    """Search the orders of classes if they are few; return whether it is proven that none fits.

    If a bottleneck is sufficient, it only asks whether there may be a placement within it; a
    negative answer raises the bound.

    Args:
        search: with a placement or without.
    """
    if not search.open() or not class_orders.applies(search.problem, search.nodes):
        return False
    if search.enough is not None:
        if not stage_program.applies(search.problem) and not _has_chains(
            search, search.enough, ENDS.enough
        ):
            search.prove(search.nothing_below())
        return False
    if search.best is None and find_any(search):
        return True
    if search.best is not None and search.open():
        search_orders(search)
    return False


def find_any(search: Search) -> bool:
    """Look for a placement where no start fits: a chain of any order, within a growing limit.

    A limit without a chain raises the bound.

    Args:
        search: of a problem that ``class_orders.applies`` to.

    Returns:
        True if it is proven that there is no placement.
    """
    whole = _longest_ms(search.problem)
    uppers = [upper for times in GROWTH_FACTORS if 0 < (upper := times * search.bound) < whole]
    for upper in uppers:
        if _has_chains(search, upper):
            return False
        search.prove(upper)
    return whole > 0 and not _has_chains(search, whole)


def _has_chains(search: Search, upper: float, share: float = ENDS.orders) -> bool:
    """Look for a placement within a bottleneck, in a share of the time.

    Whether there is one, or may be.
    """
    given = ClassOrders(search.problem, reduced(search.problem, upper), upper)
    some = False
    for order in class_orders.orders(search.problem):
        chain = _chain(search, given, order, share)
        if (
            chain is None
            or search.value <= upper
            or (search.enough is None and search.best is not None)
        ):
            return True
        # which requires more than chains account for
        some = some or chain.devices is not None
    return some


def _longest_ms(problem: Problem) -> float:
    """Return a time that no device exceeds, whatever it holds."""
    devices = range(len(problem.devices))
    work = sum(
        max(problem.compute_ms(layer, device) for device in devices)
        for layer in range(len(problem.layers))
    )
    again = sum(map(max, problem.forward_ms)) if problem.may_recompute else 0.0
    sizes = [
        size for value in problem.values for size in (value.bytes, value.gradient_bytes) if size
    ]
    sent = sum(map(problem.slowest_ms, sizes))
    return work + again + len(problem.devices) * sent


def search_orders(search: Search) -> bool:
    """Go through all orders; whether each of them was answered.

    Args:
        search: with a placement, of a problem that ``class_orders.applies`` to.
    """
    likely = _likely_first(search, class_orders.orders(search.problem))
    bounds, known = dict.fromkeys(likely, search.bound), None
    # A bottleneck within a wide gap is refuted quickly, and is the bound if time is short.
    if has_wide_gap(search) and not _refute_each(search, bounds, 1 - SWEEP.wide_gap / 2):
        return False
    while search.open() and bounds != known:
        known = dict(bounds)
        if not _refute_each(search, bounds):
            return False
    return True


def _refute_each(search: Search, bounds: dict[Order, float], share: float = 1.0) -> bool:
    """Ask each order that may have something better for it; whether each was answered.

    Args:
        search: as above.
        bounds: by order, what is proven of it, which is raised.
        share: the required bottleneck, as a fraction of the best known one.
    """
    given: ClassOrders | None = None
    for order, bound in bounds.items():
        upper = share * search.better()
        if bound >= upper or not search.open():
            continue
        if given is None or given.upper > upper:
            given = ClassOrders(search.problem, nodes_within(search, upper), upper)
        chain = _chain(search, given, order)
        if chain is None:
            return False
        bounds[order] = max(bound, min(chain.bound, upper))
    least = min(bounds.values())
    search.prove(search.nothing_below() if least >= search.better() else least)
    return True


def _chain(
    search: Search, given: ClassOrders, order: Order, share: float = ENDS.orders
) -> Chain | None:
    """Return the best chain of an order, which is offered.

    Where memory does not allow it, that by what memory does allow.
    """
    found: Chain | None = None
    memories: tuple[Memory, ...] = (
        ("sums", "exact") if memory_bounds.can_bind(search.problem) else ("sums",)
    )
    for memory in memories:
        before = search.value
        chain = (
            None if search.over(share) else given.best(order, lambda: search.over(share), memory)
        )
        if chain is None:
            return found
        search.meter.done += chain.work
        search.offer(chain.devices, "ideals")
        found = chain
        if (
            chain.devices is None
            or search.value < before
            or not _breaks_memory(search, chain.devices)
        ):
            break
    return found


def _breaks_memory(search: Search, devices: list[int]) -> bool:
    """Return whether memory makes a placement longer than its chain, or infeasible."""
    result = costs.evaluate(search.problem, devices)
    return result is not None and (bool(result.recompute) or not costs.fits(search.problem, result))


def _likely_first(search: Search, orders: Sequence[Order]) -> list[Order]:
    """Return the orders that resemble the order of the best placement first."""
    assert search.best is not None
    result = costs.costs_of(search.problem, search.best)  # it was found, so it can be
    kind_of = {
        device: kind
        for kind, alike in enumerate(search.problem.alike_devices())
        for device in alike
    }
    best = [kind_of[device] for device in result.stages]

    def unlike(order: Order) -> int:
        return sum(one != other for one, other in zip(order, best, strict=False))

    return sorted(orders, key=unlike)
