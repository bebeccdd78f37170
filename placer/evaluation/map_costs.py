"""The costs of one map, with its faults."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from placer.evaluation.faults import (
    constraint_faults,
    link_faults,
    memory_faults,
    not_contiguous,
    time_faults,
)
from placer.schema import DeviceLoad, Fault, PlacementRequest
from placer.schema.base import FormatName
from placer.solver import costs
from placer.solver.answer import device_loads
from placer.solver.problem import Problem
from placer.solver.replicas.gradient_exchange import with_amortised_exchanges
from placer.solver.replicas.group_maps import Map
from placer.solver.replicas.replication import Replication


class MapCosts(NamedTuple):
    """A map, evaluated.

    Attributes:
        faults: the violated requirements.
        value: the objective; None if a link is missing.
        stages: the devices that hold layers, in pipeline order; of replicas, the first of a stage.
        loads: of each device; empty if a link is missing.
        result: the costs of a pipeline; None if a link is missing, and of several pipelines.
    """

    faults: tuple[Fault, ...]
    value: float | None = None
    stages: tuple[str, ...] = ()
    loads: tuple[DeviceLoad, ...] = ()
    result: costs.Costs | None = None


def costs_of_map(
    request: PlacementRequest,
    where: Map,
    form: FormatName | None = None,
    replication: Replication | None = None,
) -> MapCosts:
    """Return the costs and the faults of a map whose names are all known.

    Args:
        request: the question, with all chosen but the map.
        where: the device of each layer.
        form: the format to which the user restricts placements, if any.
        replication: what replicas of the devices cost; None without replicas.
    """
    problem = Problem.from_request(request)
    if replication is not None and request.objective == "throughput":
        problem = with_amortised_exchanges(problem, replication)
    elif replication is not None:
        problem = replace(problem, replication=replication)
    faults = [*constraint_faults(request, where), *link_faults(request, where)]
    assignment = problem.assignment_of(where)
    result = costs.evaluate(problem, assignment)
    # If all links are there, the stages form a cycle. Report the costs without contiguity as well.
    if result is None and costs.passable(problem, assignment):
        faults.append(not_contiguous(request, where, _remedy(form)))
        result = costs.evaluate(replace(problem, contiguous=False), assignment)
    if result is None:
        return MapCosts(tuple(faults))
    loads = device_loads(problem, assignment, result)
    faults += [*memory_faults(loads), *time_faults(request, loads)]
    stages = tuple(problem.devices[number].name for number in result.stages)
    return MapCosts(tuple(faults), result.objective_value, stages, loads, result)


def _remedy(form: FormatName | None) -> str:
    """Return what allows several segments of a device."""
    allowed = "constraints.contiguous = false allows this, and the cost here assumes it"
    return allowed if form is None else f"a request without format {form!r} and with {allowed}"
