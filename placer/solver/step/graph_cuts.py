"""Cuts of a graph into stages on devices of one kind, the lowest bound first.

A cut is a chain of ideals (``stage_ideals.py``): each stage has the layers of one ideal that are
not in the ideal before it. Its bound is computed as for stages with one replica each
(``group_bounds.py``), over the fastest link. If links differ, no more is proven than the bound of
the first cut, since another order of the devices may be better.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from placer.solver.chain.optimal_cuts import device_classes
from placer.solver.problem import Problem
from placer.solver.replicas.group_bounds import GroupBounds, Part
from placer.solver.replicas.group_costs import GroupModel
from placer.solver.replicas.stage_ideals import stage_ideals
from placer.solver.replicas.stage_tables import StageTables

LOOKS = 100
"""Unfinished cuts that are extended before the caller is asked whether to go on."""

_Open = tuple[float, int, int, Part, Iterator[Part]]


LEAST_PART = 0.98
"""The least bound of all cuts, as a part of a bound that is known. From a lower one the search
would take long to reach what is known."""

MOST_OPEN = 10_000
"""The most unfinished cuts, about 80 MB for 500 ideals."""


def applies(problem: Problem) -> bool:
    """Return whether it is a training step on devices with equal times, memory and rules."""
    every = frozenset(range(len(problem.devices)))
    kinds = {
        (device.type, device.usable_bytes, rule)
        for device, rule in zip(problem.devices, problem.recompute, strict=True)
    }
    return (
        problem.contiguous
        and problem.training
        and len(problem.devices) > 1
        and len(kinds) == 1
        and all(allowed == every for allowed in problem.allowed)
    )


def cuts(problem: Problem, known_ms: float) -> Iterator[tuple[float, list[int] | None]]:
    """Return every cut, the lowest bound first; none if there are too many ideals.

    Args:
        problem: of objective ``step``, for which ``applies`` holds.
        known_ms: a bound on all steps.

    Yields:
        Its bound, which is one for all that follow, and by layer its device. None instead while
            cuts are being put together, so that whoever asks may stop; no devices at all where it
            gives up.
    """
    classes, exactly = device_classes(problem)
    is_proof = exactly and len(classes) == 1
    ideals = stage_ideals(problem)
    if not ideals.is_complete:
        yield 0.0, []
        return
    tables = StageTables(problem, ideals)
    bounds = GroupBounds(GroupModel(problem, 1, {}), (1,), tables, problem.most_devices)
    begin, numbers = bounds.first(), itertools.count()
    if begin.bound < LEAST_PART * known_ms:
        yield begin.bound, []
        return
    queue: list[_Open] = []

    def push(parts: Iterator[Part]) -> None:
        part = next(parts, None)
        if part is not None:
            entry = part.bound, -len(part.stages), next(numbers), part, parts
            heapq.heappush(queue, entry)

    push(iter([begin]))
    for look in itertools.count(1):
        if not queue:
            return
        bound, _, _, part, siblings = heapq.heappop(queue)
        if look % LOOKS == 0:
            yield bound, None
        if len(queue) > MOST_OPEN:
            yield bound, []
            return
        push(siblings)
        if part.position < tables.count - 1:
            push(bounds.following(part))
            continue
        devices = [0] * len(problem.layers)
        for stage, layers in enumerate(ideals.stages([0, *(stop for _, stop, _ in part.stages)])):
            for layer in layers:
                devices[layer] = stage
        yield bound, devices
        if not is_proof:
            yield bound, []
            return
