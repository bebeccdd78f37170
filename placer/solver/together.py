"""Placements of several models that are used one after another, from one solve.

``placer.schema.joint`` states time and memory, and the joint profile that has both.

    profiles ─▶ joint profile ─▶ solve for latency ─▶ cut by the models' names ─▶ check
"""

from __future__ import annotations

import threading

from placer.errors import InputError, kind_of
from placer.schema import Placement
from placer.schema.joint import SEPARATOR, JointPlacement, JointRequest
from placer.solver import answer, costs
from placer.solver.bounds import simple_bounds
from placer.solver.problem import Problem
from placer.solver.reduce import reduced
from placer.solver.referee.joint import check_together
from placer.solver.search import Progress
from placer.solver.solve import solve

__all__ = ["divided", "solve_together"]


def solve_together(
    request: JointRequest,
    *,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> JointPlacement:
    """Return the best placements of several models that are used one after another.

    Args:
        request: the models, and the limits of the search.
        progress: as for ``solve``; it reports the time of a request.
        stop: as for ``solve``.

    Returns:
        The placements, which have passed ``check_together``; without any, ``joint`` says why.

    Raises:
        InputError: ``request`` is not a JointRequest, or its constraints contradict each other.
    """
    if not isinstance(request, JointRequest):
        raise InputError(
            f"solve_together was given {kind_of(request)}; give a "
            "placer.schema.joint.JointRequest(models=...)"
        )
    return divided(request, solve(request.placement_request(), progress=progress, stop=stop))


def divided(request: JointRequest, joint: Placement) -> JointPlacement:
    """Return the placement of each model, from a placement of the joint profile.

    Args:
        request: the models.
        joint: the answer to ``request.placement_request()``.

    Raises:
        PlacementError: ``joint`` does not answer the request.
    """
    placements = {}
    for name in request.models if joint.layer_devices else ():
        prefix = name + SEPARATOR
        where = {
            layer.removeprefix(prefix): device
            for layer, device in joint.layer_devices.items()
            if layer.startswith(prefix)
        }
        placements[name] = _of_model(request, name, where, joint)
    runs = {name: model.runs for name, model in request.models.items()}
    found = JointPlacement(runs=runs, placements=placements, joint=joint)
    check_together(request, found)
    return found


def _of_model(
    request: JointRequest, name: str, where: dict[str, str], joint: Placement
) -> Placement:
    """Return the placement of one model with a given map."""
    problem = Problem.from_request(request.of_model(name))
    assignment = problem.assignment_of(where)
    return answer.placed(
        problem,
        assignment,
        costs.costs_of(problem, assignment),
        bound=simple_bounds.lower_bound(problem, reduced(problem)),
        method=joint.method,
        solve_time_s=joint.solve_time_s,
    )
