"""Which problems the stage-prefix form of ``stage_program.py`` can state."""

from __future__ import annotations

from placer.solver.bounds import memory_bounds
from placer.solver.contiguous.stage_links import stage_links
from placer.solver.cpsat.model import MOST_RULES
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction

MOST_CLASSES = 3
"""The most classes of devices: with more, a variable per node and device is no worse."""


def applies(problem: Problem) -> bool:
    """Return whether the stage-prefix form can state the problem."""
    return bounds(problem) and problem.one_link is not None and knows_memory(problem)


def bounds(problem: Problem) -> bool:
    """Return whether the form can state a relaxation of the problem, so that its bound holds."""
    return (
        problem.contiguous
        and problem.request.objective == "throughput"
        and len(problem.alike_devices()) <= MOST_CLASSES
        and stage_links(problem) is not None
    )


def knows_memory(problem: Problem) -> bool:
    """Return whether the form can state the limits of memory; it does not know copies."""
    return not memory_bounds.can_bind(problem) or (
        problem.training and _steady(problem) and not problem.shared
    )


def worth_building(problem: Problem, nodes: Reduction) -> bool:
    """Return whether the integer program of this problem is small enough to be written down."""
    return (len(nodes.nodes) + len(problem.values)) * problem.most_devices <= MOST_RULES


def _steady(problem: Problem) -> bool:
    """Return whether all stages have equally many micro-batches in flight, and whole passes."""
    one = problem.request.chunks == 1 and not problem.weights_apart
    return problem.request.schedule == "fill-drain" or one or problem.may_recompute
