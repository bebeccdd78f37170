"""Placements whose stages each have a number of replicas of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from placer import schedule
from placer.schema import (
    DeviceLoad,
    Placement,
    PlacementRequest,
    Replica,
    Step,
    StepChoice,
    TieBreaks,
)
from placer.solver import answer, pipelines
from placer.solver.replicas.by_stage.group_costs import Group, GroupCosts
from placer.solver.replicas.by_stage.group_search import GroupChoice, GroupSearch
from placer.solver.replicas.replica_answer import idle, marked, of_request


def placement_of_groups(request: PlacementRequest, choice: GroupChoice) -> Placement:
    """Return the placement of the best plan of a choice.

    Args:
        request: the whole question.
        choice: one that has a plan.
    """
    groups, found, units = choice.groups, choice.costs, choice.model.units
    assert groups is not None and found is not None
    asked, names = choice.request, [device.name for device in request.devices]
    profile = asked.profile
    loads = _loads(choice, groups, found)
    changed: dict[str, Any] = {
        "objective_value": found.value,
        "status": "feasible",
        "layer_devices": {
            profile.layers[layer].name: names[group.devices[0]]
            for group in groups
            for layer in group.layers
        },
        "replicas": {
            names[group.devices[0]]: tuple(
                Replica(
                    device=names[device],
                    samples=units // len(group.devices) * profile.batch_size,
                )
                for device in group.devices
            )
            for group in groups
            if len(group.devices) > 1
        },
        "batch_size": units * profile.batch_size,
        "recompute": tuple(
            name
            for number, name in enumerate(names)
            if any(number in groups[stage].devices for stage in found.recompute)
        ),
        "stages": tuple(names[group.devices[0]] for group in groups),
        "in_flight": found.in_flight,
        "devices": marked([loads.get(one.name) or idle(one) for one in request.devices]),
        **of_request(request),
    }
    if request.break_ties:
        changed["tie_breaks"] = _ties(found)
    if found.pipeline is not None:
        changed["step"] = _step(request, groups, found)
    header = answer.header(choice.model.problem, "replicas by stage", 0.0)
    return Placement.model_validate(header | changed)


def _loads(
    choice: GroupChoice, groups: Sequence[Group], found: GroupCosts
) -> dict[str, DeviceLoad]:
    """Return the load of each device that holds layers, by its name."""
    devices = choice.model.problem.devices
    return {
        devices[device].name: DeviceLoad(
            device=devices[device].name,
            layers=len(group.layers),
            compute_ms=found.compute_ms[device],
            send_ms=found.send_ms[device],
            receive_ms=found.receive_ms[device],
            load_ms=found.load_ms[device],
            memory=found.memory[stage],
            limit_bytes=devices[device].usable_bytes,
        )
        for stage, group in enumerate(groups)
        for device in group.devices
    }


def _ties(found: GroupCosts) -> TieBreaks:
    """Return the reported rank; no other plan is compared."""
    computes = found.compute_ms.values()
    return TieBreaks(
        transfer_ms=sum(found.send_ms.values()) + sum(found.receive_ms.values()),
        imbalance_ms=max(computes) - min(computes),
        proven=False,
    )


def _step(request: PlacementRequest, groups: Sequence[Group], found: GroupCosts) -> Step:
    """Return the step of the plan, without the choices."""
    pipeline, plan = found.pipeline, found.plan
    assert pipeline is not None and plan is not None
    longest = max(found.exchanges, key=lambda one: (one.exposed_ms + one.waits_ms, one.total_ms))
    timeline = schedule.simulate(pipeline, plan)
    counts = [len(group.devices) for group in groups]
    steady_state_ms, span_ms = schedule.steady_state_ms(pipeline, plan), timeline.step_ms
    busy_ms = sum(count * timeline.busy_ms[stage] for stage, count in enumerate(counts))
    if request.step_kind == "steady-state":
        span_ms = steady_state_ms
        busy_ms += sum(
            count * one.optimizer_ms for count, one in zip(counts, found.exchanges, strict=True)
        )
    whole = request.whole_batch_size
    bubble = 1 - busy_ms / (span_ms * sum(counts)) if span_ms else 0.0
    return Step(
        batch_size=whole,
        samples_per_s=1e3 * whole / found.value if found.value else None,
        bubble=min(1.0, max(0.0, bubble)),
        optimizer_ms=max(one.optimizer_ms for one in found.exchanges),
        reduction_ms=longest.total_ms,
        reduction_hidden_ms=max(0.0, longest.hidden_ms),
        kind=request.step_kind,
        isolated_ms=pipelines.isolated_ms(pipeline, plan),
        steady_state_ms=steady_state_ms,
        in_flight=plan.in_flight,
    )


def choices_of_groups(search: GroupSearch) -> list[StepChoice]:
    """Return the choices of a search that have a plan, as data."""
    found = []
    for choice in search.choices:
        groups, asked = choice.groups, choice.request
        if groups is None:
            continue
        assert asked.schedule != "auto"
        counts = tuple(len(group.devices) for group in groups)
        found.append(
            StepChoice(
                batch_size=choice.model.units * asked.profile.batch_size,
                chunks=asked.chunks,
                schedule=asked.schedule,
                contiguous=True,
                replicas=max(counts),
                replicas_by_stage=counts,
                stages=len(groups),
                objective_value=choice.value,
                bound=min(choice.bound, choice.value),
            )
        )
    return found
