"""Unlike links in the stage-prefix form: a lower bound, exact where values have one reader.

Every transfer takes at least its time over the quickest link. A class of devices, which may be
swapped, is of one host. Where a value's source and reader are at stages of unlike classes, the
transfer takes at least its time over the quickest link between two classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from placer.schema import Link
from placer.solver.nets import best_link
from placer.solver.problem import LARGEST_BYTES, Problem


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
    room = LARGEST_BYTES
    numbers = range(len(problem.devices))
    return replace(
        problem,
        request=problem.request.model_copy(
            update={"time_limit_s": time_limit_s, "break_ties": False}
        ),
        devices=tuple(
            device.model_copy(update={"memory_bytes": room, "reserve_bytes": 0})
            for device in problem.devices
        ),
        links=tuple(tuple(quickest if a != b else None for b in numbers) for a in numbers),
    )
