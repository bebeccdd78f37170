"""Enumeration of every map of layers to devices, for problems with few maps.

The integer programs are less exact than ``costs``: they do not decide recomputation per device, and
they count memory beyond 2**50 bytes in larger units. The cost of a single map is exact. The
enumeration thus proves that its best map is optimal, or that no map meets the requirements.
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
            nearest = min(nearest, (maps.missing_bytes(problem, devices), devices))
    if every is None or not proven:
        return None
    search.prove(search.nothing_below() if search.best is None else search.value)
    return nearest[1] if search.best is None else None
