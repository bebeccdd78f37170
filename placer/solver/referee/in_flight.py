"""The micro-batches in flight for which each device has memory, as schedules allow them."""

from __future__ import annotations

from collections.abc import Sequence

from placer.schema import Placement, PlacementRequest
from placer.solver.referee.claims import equal, require
from placer.solver.referee.memory import Flight
from placer.solver.referee.step import StepReading


def least(request: PlacementRequest, stages: Sequence[str], contiguous: bool, device: str) -> int:
    """Return the fewest micro-batches for which a device must have memory."""
    if not contiguous or device not in stages or request.schedule == "fill-drain":
        return request.chunks
    return min(request.chunks, len(stages) - stages.index(device))


def claimed(
    request: PlacementRequest,
    placement: Placement,
    device: str,
    reading: StepReading | None = None,
) -> Flight:
    """Return the claimed micro-batches in flight on a device, or on each of its segments."""
    if reading is not None and by_segment(request, placement.contiguous):
        return reading.flights
    if placement.in_flight and device in placement.stages:
        return placement.in_flight[placement.stages.index(device)]
    return request.chunks


def backwards(request: PlacementRequest, placement: Placement, device: str) -> int | None:
    """Return for how many micro-batches in flight backward passes have memory of their own.

    Each micro-batch beyond the fewest in flight lets one more weight-gradient pass be postponed,
    which needs such memory. Micro-batches are dealt out in whole runs, and each in a run has one.
    """
    if (
        request.schedule != "zero-bubble"
        or not placement.in_flight
        or device not in placement.stages
    ):
        return None
    room = placement.in_flight[placement.stages.index(device)]
    put_off = 1 + room - least(request, placement.stages, True, device)
    runs = room // put_off
    return room // runs + (room % runs > 0)


def check_in_flight(
    request: PlacementRequest, placement: Placement, reading: StepReading | None
) -> None:
    """Raise unless each stage has room for a number of micro-batches that the schedule allows."""
    stated = placement.in_flight
    if reading is not None and by_segment(request, placement.contiguous):
        equal("in_flight", stated, reading.plan.in_flight)
        return
    if not request.is_training or not placement.contiguous:
        require(not stated, f"in_flight is {stated}, but devices have room for all micro-batches")
        return
    stages = placement.stages
    fewest = tuple(least(request, stages, True, device) for device in stages)
    if request.schedule != "zero-bubble" or request.objective == "memory":
        equal("in_flight", stated, fewest)
        return
    most = min(request.chunks, 2 * len(stages)) if len(stages) > 1 else 1
    require(
        len(stated) == len(stages)
        and all(a <= one <= most for a, one in zip(fewest, stated, strict=True)),
        f"in_flight is {stated}: zero-bubble needs {fewest} or more, "
        f"and has no use for more than {most}",
    )


def by_segment(request: PlacementRequest, contiguous: bool) -> bool:
    """Return whether micro-batches in flight are counted segment by segment."""
    return not contiguous and (request.objective, request.schedule) == ("step", "interleaved")
