"""Naming of alike devices: the first named takes the first stage.

Alike devices can be exchanged without any change of costs. For readers of the answer, and for
execution, there is a difference. Batches mostly lie on the first device, which then is not the one
that ends a step last and begins the next.
"""

from __future__ import annotations

from math import isclose

from placer.solver import costs
from placer.solver.problem import ROUNDING, Problem


def as_named(
    problem: Problem, assignment: costs.Assignment, before: costs.Costs
) -> tuple[costs.Assignment, costs.Costs]:
    """Return the placement with stages on devices of a type in the order of the devices' names.

    It stays the same if any cost would change, or if the exchange would break a requirement.

    Args:
        problem: the placement problem.
        assignment: by layer, the index of its device; one that meets every requirement.
        before: what it costs.

    Returns:
        The placement, and what it costs.
    """
    taken: dict[str, list[int]] = {}
    for device in before.stages:
        taken.setdefault(problem.devices[device].type, []).append(device)
    exchanged = {
        old: new for alike in taken.values() for old, new in zip(alike, sorted(alike), strict=True)
    }
    found = [exchanged[device] for device in assignment]
    after = None if found == list(assignment) else costs.judged(problem, found)
    if after is None or not _are_alike(before, after):
        return assignment, before
    return found, after


def _are_alike(one: costs.Costs, other: costs.Costs) -> bool:
    """Return whether no cost differs, whichever device has it."""
    pairs = [(one.objective_value, other.objective_value)]
    for a, b in (
        (one.compute_ms, other.compute_ms),
        (one.send_ms, other.send_ms),
        (one.receive_ms, other.receive_ms),
    ):
        pairs += zip(sorted(a), sorted(b), strict=True)
    return all(isclose(a, b, rel_tol=ROUNDING) for a, b in pairs)
