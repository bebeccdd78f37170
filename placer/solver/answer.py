"""The placement that is returned, from an assignment and what is proven about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import isclose
from typing import Any

from placer.errors import InputError
from placer.schema import DeviceLoad, Infeasibility, Placement, PlacementRequest, SingleDevice
from placer.schema.base import LONGEST_MS, PROVEN_GAP
from placer.solver import costs
from placer.solver.pass_times import Assignment
from placer.solver.problem import ROUNDING, Problem


def found(
    problem: Problem, assignment: Assignment, bound: float, method: str, solve_time_s: float
) -> Placement:
    """Return the placement of an assignment that meets every requirement."""
    result = costs.costs_of(problem, assignment)
    assignment, result = _in_order_of_names(problem, assignment, result)
    return placed(problem, assignment, result, bound, method, solve_time_s)


def placed(
    problem: Problem,
    assignment: Assignment,
    result: costs.Costs,
    bound: float,
    method: str,
    solve_time_s: float,
) -> Placement:
    """Return the placement of an assignment, on these very devices.

    Args:
        problem: the placement problem.
        assignment: by layer, the index of its device.
        result: what it costs.
        bound: a proven lower bound of the objective.
        method: the algorithm that found it.
        solve_time_s: seconds of solving.
    """
    _refuse_overflow(problem, result)
    value = result.objective_value
    single = single_device(problem)
    timed = problem.request.objective not in ("memory", "devices") and value > 0
    names = [device.name for device in problem.devices]
    return Placement(
        **header(problem, method, solve_time_s),
        **proof(value, bound),
        objective_value=value,
        layer_devices={
            layer.name: names[device]
            for layer, device in zip(problem.layers, assignment, strict=True)
        },
        recompute=tuple(names[device] for device in sorted(result.recompute)),
        stages=tuple(names[device] for device in result.stages),
        in_flight=result.in_flight if problem.training else (),
        devices=device_loads(problem, assignment, result),
        single_device=single,
        speedup=single.objective_value / value if timed else None,
    )


def proof(value: float, bound: float) -> dict[str, Any]:
    """Return the fields of a placement that state how far its objective is proven.

    Args:
        value: the objective.
        bound: a lower bound of it; it may be negative, or above the value by rounding.
    """
    bound = min(max(bound, 0.0), value)
    gap = (value - bound) / value if value else 0.0
    return {"bound": bound, "gap": gap, "status": "optimal" if gap <= PROVEN_GAP else "feasible"}


def _in_order_of_names(
    problem: Problem, assignment: Assignment, before: costs.Costs
) -> tuple[Assignment, costs.Costs]:
    """Return the placement with stages on devices of a type in the order of the devices' names.

    Alike devices can be exchanged without any change of costs. But batches mostly lie on the first
    device, which then should not be the one that ends a step last and begins the next. The
    placement stays the same if any cost would change, or if a requirement would break.

    Args:
        problem: the placement problem.
        assignment: by layer, the index of its device; one that meets every requirement.
        before: what it costs.

    Returns:
        The placement, and what it costs.
    """
    taken: dict[str, list[int]] = {}
    for device in before.stages:
        taken.setdefault(problem.devices[device].type, []).append(device)
    exchanged = {
        old: new for alike in taken.values() for old, new in zip(alike, sorted(alike), strict=True)
    }
    found = [exchanged[device] for device in assignment]
    after = None if found == list(assignment) else costs.judged(problem, found)
    if after is None or not _are_alike(before, after):
        return assignment, before
    return found, after


def _are_alike(one: costs.Costs, other: costs.Costs) -> bool:
    """Return whether no cost differs, whichever device has it."""
    pairs = [(one.objective_value, other.objective_value)]
    for a, b in (
        (one.compute_ms, other.compute_ms),
        (one.send_ms, other.send_ms),
        (one.receive_ms, other.receive_ms),
    ):
        pairs += zip(sorted(a), sorted(b), strict=True)
    return all(isclose(a, b, rel_tol=ROUNDING) for a, b in pairs)


def nothing(
    problem: Problem, reason: Infeasibility | None, bound: float, method: str, solve_time_s: float
) -> Placement:
    """Return an answer without a placement: infeasible for a reason, or unknown if time ran out."""
    return Placement(
        **header(problem, method, solve_time_s),
        status="unknown" if reason is None else "infeasible",
        bound=bound if reason is None else None,
        single_device=single_device(problem),
        infeasible=reason,
    )


def single_device(problem: Problem) -> SingleDevice:
    """Return the best that one device does with all layers, pins and forbidden devices aside."""
    options = []
    # one device is one device, so the least busy is the best
    by_load = problem.request.objective == "devices"
    first_of_kind = {
        (device.type, device.usable_bytes): i
        for i, device in reversed([*enumerate(problem.devices)])
    }
    for index in sorted(first_of_kind.values()):
        device = problem.devices[index]
        result = costs.costs_of(problem, [index] * len(problem.layers))  # nothing crosses
        short = max(0, result.memory[index].total_bytes - device.usable_bytes)
        options.append(
            (short > 0, result.load_ms[index] if by_load else result.objective_value, index, short)
        )
    misfit, value, index, short = min(options)
    return SingleDevice(
        device=problem.devices[index].name,
        objective_value=1.0 if by_load else value,
        fits=not misfit,
        missing_bytes=short,
        load_ms=value if by_load else None,
    )


def header(problem: Problem, method: str, solve_time_s: float) -> dict[str, Any]:
    """Return the fields of a placement that its map does not change."""
    request, profile = problem.request, problem.request.profile
    return {
        **of_request(request),
        "objective": request.objective,
        "method": method,
        "solve_time_s": solve_time_s,
        "model": profile.model,
        "granularity": profile.granularity,
        "training": problem.training,
        "optimizer": profile.optimizer if problem.training else None,
        "batch_size": profile.batch_size,
        "batch_options": profile.batch_options,
        "chunks": request.chunks,
        "schedule": request.schedule,
        "contiguous": problem.one_stage_each,
    }


def of_request(request: PlacementRequest) -> dict[str, Any]:
    """Return the fields that a placement has from its request alone."""
    ratio = request.profile.optimizer_workspace_ratio
    return {
        "id": request.content_hash(),
        "optimizer_workspace_ratio": ratio if request.is_training else 0.0,
        "links_through_host": tuple(
            (link.source, link.target) for link in request.placed_on.links if link.route == "host"
        ),
    }


def device_loads(
    problem: Problem, assignment: Assignment, result: costs.Costs
) -> tuple[DeviceLoad, ...]:
    """Return the load of each device under an assignment, with the busiest devices marked."""
    layers = Counter(assignment)
    return marked(
        DeviceLoad(
            device=device.name,
            layers=layers[index],
            compute_ms=result.compute_ms[index],
            send_ms=result.send_ms[index],
            receive_ms=result.receive_ms[index],
            load_ms=result.load_ms[index],
            memory=result.memory[index],
            limit_bytes=device.usable_bytes,
        )
        for index, device in enumerate(problem.devices)
    )


def marked(loads: Iterable[DeviceLoad]) -> tuple[DeviceLoad, ...]:
    """Return the loads with the busiest devices marked."""
    every = tuple(loads)
    busiest = max(load.load_ms for load in every)
    return tuple(
        load.model_copy(update={"bottleneck": isclose(load.load_ms, busiest, rel_tol=1e-9)})
        for load in every
    )


def _refuse_overflow(problem: Problem, result: costs.Costs) -> None:
    for device, load_ms in zip(problem.devices, result.load_ms, strict=True):
        if load_ms > LONGEST_MS:
            raise InputError(
                f"device {device.name!r} would be busy for {load_ms:.3g} ms; "
                "no more than 1e9 can be placed"
            )
