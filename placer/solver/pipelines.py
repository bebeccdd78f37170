"""Pipelines of assignments: stages, their times, their transfers, and the length of a step.

In contiguous placements each device that holds layers is one stage. Otherwise stages are segments:
maximal runs of layers on one device, in the profile's order. A value goes to the first stage of
each device that reads it, and its gradient comes back from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import groupby
from math import inf

from placer import schedule
from placer.schedule import Pipeline, Plan, Transfer
from placer.schema import Schedule
from placer.solver.problem import Problem

SizeMs = Callable[[int], float]
"""The time of an exchange of so many bytes, in milliseconds."""

HasRoom = Callable[[Sequence[int]], bool]
"""Whether devices have memory for so many micro-batches in flight, by stage."""


def step_ms(problem: Problem, pipeline: Pipeline, plan: Plan) -> float:
    """Return the time of a batch and the optimizer's step in ms, isolated or steady-state.

    Args:
        problem: the placement problem, with the batch's chunks.
        pipeline: its stages.
        plan: the order of their passes.
    """
    return (
        schedule.steady_state_ms(pipeline, plan)
        if is_steady_state(problem)
        else isolated_ms(pipeline, plan)
    )


def samples_per_s(batch_size: int, step_ms: float) -> float | None:
    """Return the samples per second of a step, or None for a step without a length."""
    rate = 1e3 * batch_size / step_ms if step_ms else inf
    return rate if rate < inf else None


def is_steady_state(problem: Problem) -> bool:
    """Return whether a step is asked for that follows another."""
    return problem.request.step_kind == "steady-state"


def isolated_ms(pipeline: Pipeline, plan: Plan) -> float:
    """Return the time in ms of a step between idle devices, with the longest optimizer."""
    return schedule.step_ms(pipeline, plan) + max(
        pipeline.optimizer_by_device().values(), default=0.0
    )


def pipeline_of(
    problem: Problem,
    assignment: Sequence[int],
    stages: Sequence[int],
    again: frozenset[int] = frozenset(),
) -> Pipeline:
    """Return the stages of an assignment, with their times and transfers."""
    stage_of, places = staged(problem, assignment, stages)
    forward, backward, weights, optimizer = ([0.0] * len(places) for _ in range(4))
    for layer, stage in enumerate(stage_of):
        device = places[stage]
        forward[stage] += problem.forward_ms[layer][device]
        backward[stage] += problem.backward_ms[layer][device]
        backward[stage] += problem.again_ms(layer, device) if device in again else 0.0
        weights[stage] += weight_grad_ms(problem, layer, device)
        optimizer[stage] += optimizer_ms(problem, layer, device)
    transfers = _transfers(problem, stage_of, places)
    return Pipeline(
        places, tuple(forward), tuple(backward), tuple(weights), transfers, tuple(optimizer)
    )


def plan_of(
    problem: Problem,
    pipeline: Pipeline,
    has_room: HasRoom | None = None,
    room: Sequence[int] | None = None,
) -> Plan:
    """Return the order of a pipeline's passes, by the problem's schedule.

    Args:
        problem: the placement problem.
        pipeline: its stages.
        has_room: where micro-batches in flight are counted segment by segment, whether devices have
            memory for so many: the shortest order for which they have is taken, and where they have
            for none the one of ``schedule.plan``.
        room: by stage, for how many micro-batches it has room under zero-bubble; the most of use if
            left out.
    """
    schedule_name, chunks = problem.request.schedule, problem.request.chunks
    assert schedule_name != "auto"  # only whole questions leave it open
    if schedule_name in ("fill-drain", "1f1b") or not problem.training:
        return _fixed_plan(schedule_name, pipeline.places, chunks, problem.training)
    if has_room is not None and len(set(pipeline.places)) < len(pipeline.places):
        for plan in _shortest_first(pipeline, chunks, is_steady_state(problem)):
            if has_room(plan.in_flight):
                return plan
    return _plan_by_times(schedule_name, pipeline, chunks, None if room is None else tuple(room))


@lru_cache(maxsize=16)
def _shortest_first(pipeline: Pipeline, chunks: int, repeated: bool) -> list[Plan]:
    time_ms = schedule.steady_state_ms if repeated else schedule.step_ms
    return sorted(schedule.roomy_plans(pipeline, chunks), key=partial(time_ms, pipeline))


@lru_cache(maxsize=16)
def _plan_by_times(
    schedule_name: Schedule, pipeline: Pipeline, chunks: int, room: tuple[int, ...] | None
) -> Plan:
    return schedule.plan(
        schedule_name,
        pipeline.places,
        chunks,
        forward_ms=pipeline.forward_ms,
        backward_ms=pipeline.backward_ms,
        weight_grad_ms=pipeline.weight_grad_ms,
        transfers=pipeline.transfers,
        room=room,
    )


@lru_cache(maxsize=256)
def _fixed_plan(
    schedule_name: Schedule, places: tuple[int, ...], chunks: int, training: bool
) -> Plan:
    return schedule.plan(schedule_name, places, chunks, training=training)


def staged(
    problem: Problem, assignment: Sequence[int], stages: Sequence[int]
) -> tuple[list[int], tuple[int, ...]]:
    """Return, by layer, its stage; by stage, its device."""
    if problem.contiguous:
        place = {device: stage for stage, device in enumerate(stages)}
        return [place[device] for device in assignment], tuple(stages)
    runs = [(device, len(list(layers))) for device, layers in groupby(assignment)]
    stage_of = [stage for stage, (_, length) in enumerate(runs) for _ in range(length)]
    return stage_of, tuple(device for device, _ in runs)


def weight_grad_ms(problem: Problem, layer: int, device: int) -> float:
    """Return the part of a layer's backward pass that can be done later.

    See ``Layer.weight_half_ms``.
    """
    return (
        problem.layers[layer].weight_half_ms(problem.devices[device].type)
        if problem.training
        else 0.0
    )


def optimizer_ms(problem: Problem, layer: int, device: int) -> float:
    """Return the time of the optimizer's step for a layer on a device."""
    return (
        problem.layers[layer].optimizer_ms.get(problem.devices[device].type, 0.0)
        if problem.training
        else 0.0
    )


def _transfers(
    problem: Problem, stage_of: Sequence[int], places: Sequence[int]
) -> tuple[Transfer, ...]:
    """Return the transfers between stages of different devices, summed up by pair."""
    there: dict[tuple[int, int], float] = {}
    back: dict[tuple[int, int], float] = {}
    for value in problem.values:
        source = stage_of[value.source]
        firsts: dict[int, int] = {}
        for target in sorted({stage_of[reader] for reader in value.readers}):
            firsts.setdefault(places[target], target)
        for device, target in firsts.items():
            if device == places[source]:
                continue
            pair = source, target
            there[pair] = there.get(pair, 0.0) + problem.send_ms(value, places[source], device)
            if value.gradient_bytes:
                back[pair] = back.get(pair, 0.0) + problem.gradient_ms(
                    value, places[source], device
                )
    return tuple(
        Transfer(*pair, time_ms, back.get(pair)) for pair, time_ms in sorted(there.items())
    )
