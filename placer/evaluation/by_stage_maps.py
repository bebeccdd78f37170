"""Evaluation of maps whose stages each have a number of replicas of their own.

``placer.solver.replicas.group_costs`` has the costs, as for the solver's own plans. A micro-batch
consists of units, which are micro-batches of a measured size.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from placer.errors import InputError
from placer.evaluation.faults import (
    constraint_faults,
    faults_of_all,
    link_faults,
    memory_faults,
    not_contiguous,
)
from placer.evaluation.map_costs import MapCosts
from placer.exports.formats import format_named
from placer.schema import Fault, Placement, PlacementRequest, Profile, Schedule
from placer.schema.base import FormatName
from placer.solver.replicas.group_maps import (
    GroupMap,
    Map,
    Replicas,
    group_map,
    maps_of_pipelines,
    members_of,
    unit_profile,
    units_of_map,
)
from placer.solver.replicas.replica_answer import all_loads, loads_of_groups
from placer.solver.step.choices import TRAINING

_REMEDY = "Different numbers of replicas need stages between which all values run forwards"


def require_units_fit(
    request: PlacementRequest, where: Map, replicas: Replicas, form: FormatName | None
) -> None:
    """Raise an InputError unless the replicas of each stage can share units of a measured size."""
    counts = {name: len(members) for name, members in members_of(where, replicas).items()}
    if form is not None and not format_named(form).replicates_by_stage:
        raise InputError(
            f"the devices have {counts} replicas, and {format_named(form).title} runs equally many "
            f"of each stage; give equally many, or leave out format {form!r}"
        )
    if request.schedule not in ("auto", *TRAINING):
        raise InputError(
            f"the devices have {counts} replicas, and the request asks for schedule "
            f"{request.schedule!r}; stages with different numbers of replicas have one of "
            f"{', '.join(map(repr, TRAINING))}"
        )
    _require_equal_shares(replicas)
    _require_alike_devices(request, replicas)
    total, units = _samples(replicas), units_of_map(where, replicas)
    sizes = sorted({one.batch_size for one in (request.profile, *request.profiles)})
    if request.objective == "throughput":
        sizes = [request.profile.batch_size]
    if total % units or total // units not in sizes:
        raise InputError(
            f"the devices have {counts} replicas, so a micro-batch of {total} samples has {units} "
            f"units of {total / units:g}, and micro-batches of {sizes} samples were measured; give "
            f"shares that add up to {units} times a measured size"
        )
    if request.objective == "throughput" and request.chunks % units:
        raise InputError(
            f"the devices have {counts} replicas, which share {units} micro-batches at a time; the "
            f"number of micro-batches (chunks) is {request.chunks}: give a multiple of {units}"
        )
    if request.objective == "step" and request.whole_batch_size % total:
        raise InputError(
            f"the replicas of a stage have {total} samples in all; a batch of "
            f"{request.whole_batch_size} samples has to be a multiple of that (batch_size)"
        )


def _samples(replicas: Replicas) -> int:
    """Return the samples of a micro-batch."""
    return sum(one.samples for one in next(iter(replicas.values())))


def _require_equal_shares(replicas: Replicas) -> None:
    total = _samples(replicas)
    for name, members in replicas.items():
        samples = [one.samples for one in members]
        if len(set(samples)) > 1 or sum(samples) != total:
            raise InputError(
                f"the replicas of {name!r} have {samples} samples of a micro-batch of {total}; "
                "where stages have different numbers of replicas, give each replica of a stage an "
                "equal part of the micro-batch"
            )


def _require_alike_devices(request: PlacementRequest, replicas: Replicas) -> None:
    kinds = {
        device.name: (
            device.type,
            device.usable_bytes,
            request.constraints.recompute_on(device.name),
        )
        for device in request.devices
    }
    for name, members in replicas.items():
        # unknown devices are faults of the map
        if len({kinds[one.device] for one in members if one.device in kinds}) > 1:
            raise InputError(
                f"the replicas of {name!r} are on devices of different types, memory or "
                "recomputation rules; where stages have different numbers of replicas, give the "
                "replicas of a stage alike devices"
            )


def evaluated_by_stage(
    request: PlacementRequest, where: Map, replicas: Replicas, chosen_by: Placement | None = None
) -> MapCosts:
    """Return the costs and the faults of a map whose stages have different numbers of replicas.

    Args:
        request: the question.
        where: the device of each layer; all names are known.
        replicas: which ``require_units_fit`` accepts.
        chosen_by: the placement from which the map comes. Objective ``step`` uses its schedule if
            the request allows it, and else the best schedule for the map.
    """
    total, units = _samples(replicas), units_of_map(where, replicas)
    profile = unit_profile(request, total // units)
    assert profile is not None  # require_units_fit has found it
    faults = _faults_of_map(request, where, replicas)
    maps = [
        group_map(request, where, replicas, profile, chunks, order)
        for chunks, order in _runs(request, profile, units, chosen_by)
    ]
    if None in maps:
        faults.append(not_contiguous(request, where, _REMEDY))
    return min(
        (_costs(request, groups, faults) for groups in maps),
        key=lambda one: (len(one.faults), inf if one.value is None else one.value),
    )


def _runs(
    request: PlacementRequest, profile: Profile, units: int, chosen_by: Placement | None
) -> Iterator[tuple[int, Schedule]]:
    """Yield the number of micro-batches with each schedule that may be chosen."""
    allowed = TRAINING if request.schedule == "auto" else (request.schedule,)
    chosen = () if chosen_by is None else (chosen_by.schedule,)
    in_batch = (
        request.whole_batch_size // profile.batch_size
        if request.objective == "step"
        else request.chunks
    )
    for order in chosen if set(chosen) & set(allowed) else allowed:
        yield in_batch // units, order


def _faults_of_map(request: PlacementRequest, where: Map, replicas: Replicas) -> list[Fault]:
    """Return the violated requirements that do not depend on costs."""
    # rules that name or count devices are about all replicas
    about_devices: dict[str, object] = {
        "max_devices": None,
        "min_devices": None,
        "pinned": {},
        "forbidden": {},
    }
    rules = request.constraints.model_copy(update=about_devices)
    about_layers = request.model_copy(update={"constraints": rules})
    links = [
        fault for own in maps_of_pipelines(where, replicas) for fault in link_faults(request, own)
    ]
    return [
        *faults_of_all(request, where, replicas),
        *constraint_faults(about_layers, where),
        *dict.fromkeys(links),
    ]


def _costs(request: PlacementRequest, groups: GroupMap | None, faults: list[Fault]) -> MapCosts:
    """Return the costs of groups with all faults; no costs without an order or a link."""
    found = None if groups is None else groups.model.costs(groups.groups)
    if groups is None or found is None:
        return MapCosts(tuple(faults))
    loads = all_loads(request, loads_of_groups(request.devices, groups.groups, found))
    return MapCosts((*faults, *memory_faults(loads)), found.value, groups.stages, loads)
