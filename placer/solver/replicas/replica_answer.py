"""Placements with replicas: of equal pipelines, of shares of unlike devices, and by stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from placer import schedule
from placer.schema import (
    Device,
    DeviceLoad,
    MemoryUse,
    Placement,
    PlacementRequest,
    Replica,
    SingleDevice,
    Step,
    StepChoice,
    TieBreaks,
)
from placer.solver import answer, costs, pipelines
from placer.solver.replicas.group_costs import Group, GroupCosts, GroupModel
from placer.solver.replicas.group_search import GroupSearch
from placer.solver.replicas.replica_shapes import Shape
from placer.solver.replicas.uneven_shares import SharedBatch, UnevenShares
from placer.solver.step.step_answer import step_of


def placement_of_shape(request: PlacementRequest, shape: Shape, inner: Placement) -> Placement:
    """Return the placement of R equal pipelines.

    Args:
        request: the whole question.
        shape: the pipelines.
        inner: the placement of the first pipeline on its part of the batch.
    """
    count, share = shape.replicas, inner.batch_size
    twins = {
        first.name: [pipeline[position].name for pipeline in shape.pipelines]
        for position, first in enumerate(shape.pipelines[0])
    }
    loads = {
        name: load.model_copy(update={"device": name})
        for load in inner.devices
        for name in twins[load.device]
    }
    changed: dict[str, Any] = {
        "batch_size": count * share,
        "replicas": {
            device: tuple(Replica(device=name, samples=share) for name in twins[device])
            for device in inner.stages
        },
        "devices": all_loads(request, loads),
        "recompute": tuple(
            device.name
            for device in request.devices
            if any(device.name in twins[again] for again in inner.recompute)
        ),
        **answer.of_request(request),
    }
    if request.objective == "throughput":
        assert inner.objective_value is not None
        changed["objective_value"] = inner.objective_value / count
    if inner.step is not None:
        changed["step"] = _step_of_all(inner.step, count)
    if inner.tie_breaks is not None:
        transfer_ms = count * inner.tie_breaks.transfer_ms
        changed["tie_breaks"] = inner.tie_breaks.model_copy(update={"transfer_ms": transfer_ms})
    return inner.model_copy(update=changed)


def _step_of_all(step: Step, count: int) -> Step:
    """Return the step of so many pipelines, each of which runs this one."""
    rate = step.samples_per_s
    changed = {
        "batch_size": count * step.batch_size,
        "samples_per_s": None if rate is None else count * rate,
    }
    return step.model_copy(update=changed)


def placement_of_shares(
    request: PlacementRequest, shares: UnevenShares, found: SharedBatch
) -> Placement:
    """Return the placement of unlike devices that each hold the whole model.

    Args:
        request: the whole question.
        shares: the search that found the shares.
        found: the shares.
    """
    problems = [
        shares.problem_of(device, samples, found.chunks, found.replication)
        for device, samples in zip(found.devices, found.samples, strict=True)
    ]
    alone = [0] * len(problems[0].layers)
    results = [costs.costs_of(problem, alone) for problem in problems]
    # The first device's placement is the template; what differs by device is replaced below.
    placement = answer.found(problems[0], alone, 0.0, "shares of unlike devices", 0.0)
    names = [request.devices[device].name for device in found.devices]
    replicas = tuple(
        Replica(device=name, samples=samples)
        for name, samples in zip(names, found.samples, strict=True)
    )
    loads = {
        name: answer.device_loads(problem, alone, result)[0]
        for name, problem, result in zip(names, problems, results, strict=True)
    }
    step = step_of_shares(request, results)
    step = step.model_copy(update={"measured_batch_sizes": _measured(shares, found)})
    changed = {
        "objective_value": step.isolated_ms,
        "batch_size": sum(found.samples),
        "replicas": {names[0]: replicas},
        "devices": all_loads(request, loads),
        "recompute": tuple(
            name for name, result in zip(names, results, strict=True) if result.recompute
        ),
        "step": step,
        "tie_breaks": _ties([load.compute_ms for load in loads.values()])
        if request.break_ties
        else None,
        **answer.of_request(request),
    }
    return placement.model_copy(update=changed)


def _measured(shares: UnevenShares, found: SharedBatch) -> tuple[int, ...]:
    """Return the measured sizes, if a share has another size."""
    known = shares.measured_batch_sizes
    return () if set(found.samples) <= set(known) else known


def step_of_shares(request: PlacementRequest, results: Sequence[costs.Costs]) -> Step:
    """Return the step of devices that wait for the slowest of them.

    Args:
        request: the whole question.
        results: by device, the costs of the whole model and its share.
    """
    exchanged = [result.exchanges[0] for result in results]
    passes_ms = []
    for result in results:
        assert result.pipeline is not None and result.plan is not None
        passes_ms.append(schedule.step_ms(result.pipeline, result.plan))
    # The formula of ``uneven_shares.py``: reductions wait for the slowest device, then the longest
    # optimizer ends the step.
    busy_until_ms = max(
        one.waits_ms + ms + one.exposed_ms for ms, one in zip(passes_ms, exchanged, strict=True)
    )
    optimizer_ms = max(one.optimizer_ms for one in exchanged)
    step_ms = busy_until_ms + optimizer_ms
    exposed_ms = busy_until_ms - max(passes_ms)
    busy_ms = sum(passes_ms) + sum(one.optimizer_ms for one in exchanged)
    bubble = 1 - busy_ms / (step_ms * len(results)) if step_ms else 0.0
    plan = results[0].plan
    assert plan is not None
    return Step(
        batch_size=request.whole_batch_size,
        samples_per_s=pipelines.samples_per_s(request.whole_batch_size, step_ms),
        bubble=min(1.0, max(0.0, bubble)),
        optimizer_ms=optimizer_ms,
        reduction_ms=exchanged[0].total_ms,
        reduction_hidden_ms=max(0.0, exchanged[0].total_ms - exposed_ms),
        kind=request.step_kind,
        isolated_ms=step_ms,
        steady_state_ms=step_ms,
        in_flight=plan.in_flight,
    )


def idle(device: Device) -> DeviceLoad:
    """Return the load of a device without layers."""
    return DeviceLoad(
        device=device.name,
        layers=0,
        compute_ms=0.0,
        send_ms=0.0,
        receive_ms=0.0,
        load_ms=0.0,
        memory=MemoryUse(),
        limit_bytes=device.usable_bytes,
    )


def all_loads(request: PlacementRequest, known: Mapping[str, DeviceLoad]) -> tuple[DeviceLoad, ...]:
    """Return the load of each device of a request, the busiest ones marked.

    Args:
        request: the whole question.
        known: by name, the loads of devices that hold layers.
    """
    return answer.marked(known.get(one.name) or idle(one) for one in request.devices)


def _ties(computes_ms: Collection[float], transfer_ms: float = 0.0) -> TieBreaks:
    """Return the reported rank; no other map is compared."""
    spread_ms = max(computes_ms) - min(computes_ms)
    return TieBreaks(transfer_ms=transfer_ms, imbalance_ms=spread_ms, proven=False)


def finished(
    placement: Placement,
    bound: float,
    single: SingleDevice,
    choices: Sequence[StepChoice],
    time_s: float,
) -> Placement:
    """Return a placement with what is known of all shapes.

    Args:
        placement: the best of all shapes.
        bound: a lower bound on the objective of all shapes.
        single: the best that one device does.
        choices: of all shapes.
        time_s: the duration of the search.
    """
    value = placement.objective_value
    assert value is not None
    changed = answer.proof(value, bound) | {
        "single_device": single,
        "speedup": single.objective_value / value if value else None,
        "solve_time_s": time_s,
    }
    if placement.step is not None:
        changed["step"] = placement.step.model_copy(update={"choices": tuple(choices)})
    return placement.model_copy(update=changed)


def choices_of_shares(request: PlacementRequest, shares: UnevenShares) -> list[StepChoice]:
    """Return the best shares of each number of devices as data."""
    found = []
    for replicas, bound in sorted(shares.bounds.items()):
        best = shares.found.get(replicas)
        if best is None and bound == float("inf"):
            continue
        samples = sum(best.samples) if best is not None else request.whole_batch_size
        found.append(
            StepChoice(
                batch_size=samples,
                chunks=request.whole_batch_size // samples,
                schedule=shares.schedule,
                contiguous=True,
                replicas=replicas,
                stages=1,
                objective_value=None if best is None else best.step_ms,
                bound=bound if best is None else min(bound, best.step_ms),
            )
        )
    return found


def placement_of_groups(
    request: PlacementRequest, model: GroupModel, groups: Sequence[Group], found: GroupCosts
) -> Placement:
    """Return the placement of stages with numbers of replicas of their own.

    Args:
        request: the whole question.
        model: of their costs.
        groups: the stages.
        found: their costs.
    """
    units, names = model.units, [device.name for device in request.devices]
    profile = model.problem.request.profile
    loads = loads_of_groups(request.devices, groups, found)
    device_of = {layer: names[group.devices[0]] for group in groups for layer in group.layers}
    changed: dict[str, Any] = {
        "objective_value": found.value,
        "status": "feasible",
        "layer_devices": {
            layer.name: device_of[number] for number, layer in enumerate(profile.layers)
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
        "devices": all_loads(request, loads),
        **answer.of_request(request),
    }
    if request.break_ties:
        transfer_ms = sum(found.send_ms.values()) + sum(found.receive_ms.values())
        changed["tie_breaks"] = _ties(found.compute_ms.values(), transfer_ms)
    if found.pipeline is not None:
        assert found.plan is not None
        counts = {stage: len(group.devices) for stage, group in enumerate(groups)}
        exchanges = dict(enumerate(found.exchanges))
        changed["step"] = step_of(
            request, found.pipeline, found.plan, found.value, exchanges, counts
        )
    header = answer.header(model.problem, "replicas by stage", 0.0)
    return Placement.model_validate(header | changed)


def loads_of_groups(
    devices: Sequence[Device], groups: Sequence[Group], found: GroupCosts
) -> dict[str, DeviceLoad]:
    """Return the load of each device that holds layers, by its name.

    Args:
        devices: of the request.
        groups: the stages.
        found: their costs.
    """
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
