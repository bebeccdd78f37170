"""Every map tried, where maps are few and all else has left the question open.

The integer programs know less than costs do: where devices may recompute, and of memory beyond
2**50 bytes, which they count in larger units. What a map costs is exact, so that the best of all is
proven, or that none meets what is asked.
"""

from __future__ import annotations

from math import inf

from placer.solver import costs
from placer.solver.cpsat.runner import PER_WORK
from placer.solver.enumeration import maps
from placer.solver.search import Search

METHOD = "every map"


def try_all(search: Search) -> list[int] | None:
    """Offer every map where they are few, and prove the best of them.

    Returns:
        Where none is a placement the one that comes closest to the memory limits, by layer its
        device; empty if none meets all else. None where there is a placement, or none is proven.
    """
    problem, proven = search.problem, True
    every = maps.few(problem, search.nodes)
    nearest: tuple[float, list[int]] = (inf, [])
    for devices in every or ():
        if search.counted(1 / PER_WORK.maps):
            return None
        result = costs.evaluate(problem, devices) if costs.allowed(problem, devices) else None
        if result is None or result.objective_value > search.value:
            continue
        search.offer(devices, METHOD)
        # it does not fit, in this order of its stages
        if result.objective_value < search.value:
            proven = proven and (
                not problem.training or maps.has_one_order(problem, devices, result.stages)
            )
            nearest = min(nearest, (maps.short_bytes(problem, devices), devices))
    if every is None or not proven:
        return None
    search.prove(search.nothing_below() if search.best is None else search.value)
    return nearest[1] if search.best is None else None
