"""Presentations of a stored placement under its own schedule: timeline, trace and report."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from placer.errors import InputError
from placer.schema import (
    DeviceTime,
    Placement,
    PlacementRequest,
    Profile,
    Timeline,
    TimelineCopy,
    TimelinePass,
)

from ..workers.solving import read_request
from ..workers.worker import Report
from .evaluation import EvaluationInput

if TYPE_CHECKING:
    from placer import schedule
    from placer.solver.costs import Costs
    from placer.solver.problem import Problem as Indexed

# Largest number of passes in a timeline; a longer batch is shown by its first micro-batches.
MAX_PASSES = 6000


def timeline_task(payload: bytes, report: Report, stop: threading.Event) -> bytes:
    """Return the Timeline of a stored placement as JSON."""
    return _shown(
        payload, lambda request, placement: timeline(request, placement).model_dump_json()
    )


def trace_task(payload: bytes, report: Report, stop: threading.Event) -> bytes:
    """Return the trace of a stored placement for Perfetto and Chrome."""
    return _shown(payload, lambda request, placement: trace(timeline(request, placement)))


def report_task(payload: bytes, report: Report, stop: threading.Event) -> bytes:
    """Return the report of a stored placement as HTML, as ``placer show --html`` writes it."""
    from placer.report.page import html_report

    def show(request: PlacementRequest, placement: Placement) -> str:
        # A profile has the times of layers for a micro-batch, not for a replica's share of it.
        is_shown = placement.layer_devices and not placement.replicas
        return html_report(placement, profile_of(request, placement) if is_shown else None)

    return _shown(payload, show)


def _shown(payload: bytes, show: Callable[[PlacementRequest, Placement], str]) -> bytes:
    # Safe to unpickle: this service pickled it. The client's bytes inside it are only parsed.
    given: EvaluationInput = pickle.loads(payload)
    (stored,) = given.stored
    placement = Placement.model_validate_json(stored.placement)
    return show(read_request(stored.request), placement).encode()


def profile_of(request: PlacementRequest, placement: Placement) -> Profile:
    """Return the profile with the placement's micro-batch size and the request's devices.

    Raises:
        InputError: The request does not allow the placement's choice.
    """
    return _asked(request, placement).profile.model_copy(update={"cluster": request.placed_on})


def _asked(request: PlacementRequest, placement: Placement) -> PlacementRequest:
    """Return the request with the micro-batches and the schedule of the placement."""
    from placer.solver.latency.generation import mean_pass_request
    from placer.solver.step.choices import question_of

    if request.objective == "generation":
        return mean_pass_request(request)
    asked = question_of(request, placement)
    if asked is None:
        raise _not_allowed(placement)
    return asked


def _not_allowed(placement: Placement) -> InputError:
    return InputError(
        f"placement {placement.id} has {placement.chunks} micro-batches of {placement.batch_size}"
        f" samples under {placement.schedule!r}, which its request does not allow; solve the"
        " request again"
    )


class _Batch(NamedTuple):
    """A batch to simulate.

    Attributes:
        asked: Request with all of its micro-batches, and its schedule.
        pipeline: Stages; their optimizers include the exchanges of replicas.
        plan: Order of the passes of the micro-batches that are shown.
        held_by: For each place of the pipeline, the devices that share its micro-batches.
        units: Parts of a micro-batch, each of which one device of a stage computes.
        single_device_ms: Time of the shown micro-batches on the best single device; None if the
            placement names no such device, or has replicas.
    """

    asked: PlacementRequest
    pipeline: schedule.Pipeline
    plan: schedule.Plan
    held_by: Mapping[int, tuple[str, ...]]
    units: int = 1
    single_device_ms: float | None = None


def timeline(request: PlacementRequest, placement: Placement) -> Timeline:
    """Simulate a batch of a placement, pass by pass, under the placement's own schedule.

    Exchanges of replicas are a part of the optimizer. Of equal pipelines the timeline shows the
    first one. Where stages have different numbers of replicas, it shows every device, and units in
    place of micro-batches. Of objective ``generation`` it shows a mean pass. Where parameters rest
    on the host, a pass takes as long as the first micro-batch, with its waits for their copies.

    Raises:
        InputError: The placement has no map, its map cannot run, or the request does not allow its
            choice.
    """
    from placer import schedule
    from placer.solver.replicas.group_maps import is_by_stage
    from placer.solver.step.state_on_host import asked_with

    if not placement.layer_devices:
        raise InputError(
            f"placement {placement.id} is {placement.status}: it has no map, so there is no"
            " timeline"
        )
    request = asked_with(request, placement)
    by_stage = is_by_stage(placement.layer_devices, placement.replicas)
    batch = _batch_of_units(request, placement) if by_stage else _batch(request, placement)
    asked, pipeline, plan, held_by, units, single_device_ms = batch
    # Only objective "step" allows "auto", and its placements name the chosen schedule.
    assert asked.schedule != "auto"
    run = schedule.simulate(pipeline, plan)
    optimizer = pipeline.optimizer_by_device()
    held = {place: held_by[place] for place in dict.fromkeys(pipeline.places)}
    members = [held_by[place] for place in pipeline.places]
    span_ms = run.step_ms * sum(map(len, held.values()))
    busy_ms = sum(len(names) * run.busy_ms[place] for place, names in held.items())
    return Timeline(
        id=placement.id,
        schedule=asked.schedule,
        training=asked.is_training,
        chunks=asked.chunks * units,
        shown_chunks=plan.chunks * units,
        step_ms=run.step_ms + max(optimizer.values(), default=0.0),
        single_device_ms=single_device_ms,
        bubble=min(1.0, max(0.0, 1 - busy_ms / span_ms)) if span_ms else 0.0,
        devices=tuple(
            DeviceTime(
                device=name,
                busy_ms=run.busy_ms[place],
                idle_ms=max(0.0, run.idle_ms[place]),
                optimizer_ms=optimizer.get(place, 0.0),
            )
            for place, names in held.items()
            for name in names
        ),
        passes=_passes(run, members, units),
        copies=_copies(run, members, units),
    )


def _batch(request: PlacementRequest, placement: Placement) -> _Batch:
    """Return the batch of a placement, of its first pipeline if it has equal ones."""
    from placer.solver import pipelines
    from placer.solver.replicas.gradient_exchange import with_exchanges

    asked = _asked(request, placement)
    problem, assignment, result = _evaluated(request, asked, placement)
    index = {device.name: number for number, device in enumerate(problem.devices)}
    recomputed = frozenset(index[name] for name in placement.recompute if name in index)
    pipeline = pipelines.pipeline_of(problem, assignment, result.stages, recomputed)
    if placement.resting:
        pipeline = _with_copies(pipeline, problem, assignment, result.stages, placement)
    shown = min(asked.chunks, _most_chunks(len(pipeline.places), len(set(pipeline.places))))
    problem = replace(problem, request=asked.model_copy(update={"chunks": shown}))
    held = placement.in_flight or result.in_flight
    has_room = partial(_fit_in_flight, held) if held else None
    room = [min(one, shown) for one in held] if held else None
    plan = pipelines.plan_of(problem, pipeline, has_room, room)
    if result.exchanges:
        pipeline = with_exchanges(pipeline, dict(result.exchanges))
    single = placement.single_device
    return _Batch(
        asked,
        pipeline,
        plan,
        {place: (problem.devices[place].name,) for place in pipeline.places},
        single_device_ms=None
        if single is None or placement.replicas
        else _single_device_ms(problem, index[single.device], shown),
    )


def _batch_of_units(request: PlacementRequest, placement: Placement) -> _Batch:
    """Return the batch of a placement whose stages have different numbers of replicas."""
    from placer.solver.replicas.group_maps import group_map, members_of, unit_profile, units_of_map

    where, replicas = placement.layer_devices, placement.replicas
    units = units_of_map(where, replicas)
    profile = unit_profile(request, placement.batch_size // units)
    if profile is None:
        raise _not_allowed(placement)
    members = members_of(where, replicas)
    shown = min(placement.chunks, _most_chunks(units * len(members), len(members)))
    # Other objectives do not compute the passes.
    stepped = request.model_copy(update={"objective": "step"})
    groups = group_map(stepped, where, replicas, profile, shown, placement.schedule)
    found = None if groups is None else groups.model.costs(groups.groups)
    if groups is None or found is None:
        reason = "values run in a cycle" if groups is None else "a link is missing"
        raise InputError(f"placement {placement.id} cannot run: {reason}")
    assert found.pipeline is not None and found.plan is not None  # of objective "step"
    return _Batch(
        groups.model.problem.request.model_copy(update={"chunks": placement.chunks}),
        found.pipeline,
        found.plan,
        {stage: members[first] for stage, first in enumerate(groups.stages)},
        units,
    )


def _with_copies(
    pipeline: schedule.Pipeline,
    problem: Indexed,
    assignment: Sequence[int],
    stages: Sequence[int],
    placement: Placement,
) -> schedule.Pipeline:
    """Return the pipeline with the copies of resting parameters as a part of its passes."""
    from placer.solver import pass_times, pipelines

    stage_of, places = pipelines.staged(problem, assignment, stages)
    forward_ms = [0.0] * len(places)
    resting = problem.by_number(placement.resting)
    for stage, own_ms in zip(
        stage_of, pass_times.layer_ms(problem, assignment, resting), strict=True
    ):
        forward_ms[stage] += own_ms
    return replace(pipeline, forward_ms=tuple(forward_ms))


def _evaluated(
    request: PlacementRequest, asked: PlacementRequest, placement: Placement
) -> tuple[Indexed, list[int], Costs]:
    """Return the problem that a placement answers, the device of each layer, and its costs.

    Raises:
        InputError: A link that the map needs is missing.
    """
    from placer.solver import costs
    from placer.solver.problem import Problem
    from placer.solver.replicas.replica_shapes import replication_of

    problem = Problem.from_request(asked)
    if placement.replicas:
        problem = replace(problem, replication=replication_of(request, placement.replicas))
    assignment = problem.assignment_of(placement.layer_devices)
    for contiguous in dict.fromkeys((problem.contiguous, False)):
        tried = replace(problem, contiguous=contiguous)
        result = costs.evaluate(tried, assignment)
        if result is not None:
            return tried, assignment, result
    raise InputError(f"placement {placement.id} cannot run: a link is missing")


def _passes(
    run: schedule.Timeline, members: Sequence[tuple[str, ...]], units: int
) -> tuple[TimelinePass, ...]:
    """Return the passes of a simulated run, unit by unit.

    Args:
        run: Simulated micro-batches.
        members: For each stage, the devices that share its units evenly, one after another.
        units: Parts of a micro-batch.
    """
    found = [
        TimelinePass(
            device=device,
            stage=task.stage,
            phase=task.phase,
            micro_batch=task.micro_batch * units + number * share + turn,
            start_ms=_part_ms(task.start_ms, task.end_ms, turn, share),
            end_ms=_part_ms(task.start_ms, task.end_ms, turn + 1, share),
        )
        for task in run.tasks
        for share in [units // len(members[task.stage])]
        for number, device in enumerate(members[task.stage])
        for turn in range(share)
    ]
    return tuple(sorted(found, key=lambda one: one.start_ms))


def _copies(
    run: schedule.Timeline, members: Sequence[tuple[str, ...]], units: int
) -> tuple[TimelineCopy, ...]:
    """Return the transfers of a simulated run, unit by unit; arguments as for ``_passes``.

    The busier end of a transfer sends or receives its units one after another, and the time of the
    transfer is shown in equal parts. So no device sends, or receives, two units at once.
    """
    found = []
    for copy in run.transfers:
        sources, targets = members[copy.source], members[copy.target]
        turns = units // min(len(sources), len(targets))
        found += [
            TimelineCopy(
                source=sources[unit * len(sources) // units],
                target=targets[unit * len(targets) // units],
                source_stage=copy.source,
                target_stage=copy.target,
                carries="values" if copy.phase == "forward" else "gradients",
                micro_batch=copy.micro_batch * units + unit,
                start_ms=_part_ms(copy.start_ms, copy.end_ms, unit % turns, turns),
                end_ms=_part_ms(copy.start_ms, copy.end_ms, unit % turns + 1, turns),
            )
            for unit in range(units)
        ]
    return tuple(sorted(found, key=lambda one: one.start_ms))


def _part_ms(start_ms: float, end_ms: float, part: int, parts: int) -> float:
    """Return when some of several equal parts of a time have passed."""
    return end_ms if part == parts else start_ms + (end_ms - start_ms) * part / parts


def _single_device_ms(problem: Indexed, device: int, chunks: int) -> float:
    """Return the time of ``chunks`` micro-batches and the optimizer step on one device, in ms."""
    from placer.solver import costs, pipelines

    layers = range(len(problem.layers))
    result = costs.costs_of(problem, [device] * len(layers))  # no link can be missing
    return chunks * result.compute_ms[device] + sum(
        pipelines.optimizer_ms(problem, layer, device) for layer in layers
    )


def _fit_in_flight(most: Sequence[int], flight: Sequence[int]) -> bool:
    return all(one <= held for one, held in zip(flight, most, strict=True))


def trace(shown: Timeline) -> str:
    """Return a timeline in the Trace Event format."""
    from placer.report.timeline import Row, events

    rows = [
        Row(p.device, p.phase, p.stage, None, p.micro_batch, p.start_ms, p.end_ms)
        for p in shown.passes
    ]
    rows += [
        Row(
            f"{copy.source} → {copy.target}",
            copy.carries,
            copy.source_stage,
            copy.target_stage,
            copy.micro_batch,
            copy.start_ms,
            copy.end_ms,
        )
        for copy in shown.copies
    ]
    passes_end_ms = shown.step_ms - max(spent.optimizer_ms for spent in shown.devices)
    for spent in shown.devices:
        if spent.optimizer_ms:
            end_ms = passes_end_ms + spent.optimizer_ms
            rows.append(Row(spent.device, "optimizer", None, None, 0, passes_end_ms, end_ms))
    devices = [spent.device for spent in shown.devices]
    made = events({"predicted": rows}, devices)
    return json.dumps({"traceEvents": made, "displayTimeUnit": "ms"})


def _most_chunks(stages: int, devices: int) -> int:
    """Return the number of micro-batches to show: whole rounds through the devices, if any."""
    most = max(1, MAX_PASSES // (3 * stages))
    return most - most % devices if most > devices else most
