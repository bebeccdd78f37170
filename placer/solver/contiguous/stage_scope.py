"""The scope of the stage-prefix form, ``stage_program.py``: its problems, and how it sees links.

Unlike links give a lower bound, which is exact where values have one reader. Every transfer takes
at least its time over the quickest link. A class of devices, which may be swapped, is of one host.
Where a value's source and reader are at stages of unlike classes, the transfer takes at least its
time over the quickest link between two classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from placer.schema import Link
from placer.schema.base import LARGEST_BYTES
from placer.solver.bounds import memory_bounds
from placer.solver.cpsat.model import MOST_RULES
from placer.solver.nets import best_link
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


@dataclass(frozen=True)
class StageLinks:
    """The links as the stages see them.

    Attributes:
        quickest: no transfer takes less than over this.
        between: nor any between two classes of devices less than over this; None where that is the
            same.
    """

    quickest: Link
    between: Link | None = None


def stage_links(problem: Problem) -> StageLinks | None:
    """Return the links of a problem; None if no devices are linked."""
    classes = problem.alike_devices()
    place = {device: index for index, members in enumerate(classes) for device in members}
    links = {
        (source, target): link
        for source, row in enumerate(problem.links)
        for target, link in enumerate(row)
        if link is not None and source != target
    }
    if not links:
        return None
    across = [link for (source, target), link in links.items() if place[source] != place[target]]
    quickest, between = best_link(list(links.values())), best_link(across) if across else None
    return StageLinks(quickest, None if between == quickest else between)


def quickest_everywhere(problem: Problem, quickest: Link, time_limit_s: float) -> Problem:
    """Return the problem with that link between all devices and no limits of memory.

    No harder, and links all alike.

    Args:
        problem: the placement problem.
        quickest: as good as any link.
        time_limit_s: for the search of its answer.
    """
    numbers = range(len(problem.devices))
    return replace(
        problem,
        request=problem.request.model_copy(
            update={"time_limit_s": time_limit_s, "break_ties": False}
        ),
        devices=tuple(
            device.model_copy(update={"memory_bytes": LARGEST_BYTES, "reserve_bytes": 0})
            for device in problem.devices
        ),
        links=tuple(tuple(quickest if a != b else None for b in numbers) for a in numbers),
    )
