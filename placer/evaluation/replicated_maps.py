"""Evaluation of maps whose stages several devices hold: each pipeline, and what they exchange.

R of every stage ──▶ R pipelines ──▶ each one's question and costs ──┬──▶ loads and faults
                         └──▶ what the replicas of a stage exchange ──┘    objective of all
unlike numbers ──▶ ``by_stage_maps``
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from placer.errors import InputError
from placer.evaluation.by_stage_maps import evaluated_by_stage, require_units_fit
from placer.evaluation.faults import faults_of_all
from placer.evaluation.map_costs import MapCosts, costs_of_map
from placer.exports.formats import format_named
from placer.schema import Fault, Placement, PlacementRequest, Schedule
from placer.schema.base import FormatName
from placer.schema.request import OBJECTIVES_OF_REPLICAS
from placer.solver.replicas.group_maps import (
    Map,
    Replicas,
    is_by_stage,
    maps_of_pipelines,
    members_of,
)
from placer.solver.replicas.replica_answer import all_loads, step_of_shares
from placer.solver.replicas.replica_shapes import pipelines_of, question_of_replicas, replication_of
from placer.solver.replicas.replication import Replication
from placer.solver.step.choices import kinds
from placer.utils.units import count_text


class _Run(NamedTuple):
    """What is chosen besides the map."""

    chunks: int
    order: Schedule
    contiguous: bool | None


def require_replicas_fit(
    request: PlacementRequest, where: Map, replicas: Replicas, form: FormatName | None = None
) -> None:
    """Raise an InputError unless replicas fit a map and can share the request's micro-batches."""
    if form is not None and not format_named(form).replicates:
        raise InputError(
            f"the map has replicas, and {format_named(form).title} runs one pipeline; leave out "
            f"the replicas, or format {form!r}"
        )
    if request.objective not in OBJECTIVES_OF_REPLICAS or not request.is_training:
        kind = "training" if request.is_training else "inference"
        raise InputError(
            f"the map has replicas, and the request asks for objective {request.objective!r} of "
            f"{kind}; replicas are evaluated for training under objective 'step' or 'throughput'"
        )
    held = sorted(set(where.values()))
    if unknown := sorted(set(replicas) - set(held)):
        raise InputError(
            f"replicas are given for {unknown}, and the map has layers on {held}; give replicas of "
            "these devices only"
        )
    _require_members(where, replicas)
    if is_by_stage(where, replicas):
        require_units_fit(request, where, replicas, form)
    else:
        _require_shares(request, replicas)


def _require_members(where: Map, replicas: Replicas) -> None:
    """Raise an InputError unless each device holds one replica, and the first is the stage's."""
    for name, members in replicas.items():
        if len(members) < 2:
            raise InputError(
                f"replicas of {name!r}: {count_text(len(members), 'device')} given; give two or "
                f"more, or leave {name!r} out of the replicas"
            )
        if members[0].device != name:
            raise InputError(
                f"replicas of {name!r}: the first one is {members[0].device!r}; give {name!r} first"
            )
    used = [name for names in members_of(where, replicas).values() for name in names]
    if twice := sorted({name for name in used if used.count(name) > 1}):
        raise InputError(f"replicas: {twice[0]!r} is given twice; a device holds one replica")


def _require_shares(request: PlacementRequest, replicas: Replicas) -> None:
    shares = {tuple(one.samples for one in members) for members in replicas.values()}
    if len(shares) > 1:
        raise InputError(
            f"replicas have {sorted(shares)} samples; give every stage the same shares"
        )
    (samples,) = shares
    if request.objective == "throughput":
        expected, size = request.profile.batch_size, request.chunks
        if set(samples) != {expected} or size % len(samples):
            raise InputError(
                f"replicas have {samples} samples of {size} micro-batches; under objective "
                f"'throughput' each computes {expected} samples, as profiled, and the number of "
                "micro-batches (chunks) is a multiple of the number of replicas"
            )
    elif request.whole_batch_size % sum(samples):
        raise InputError(
            f"replicas have {samples} samples, {sum(samples)} in all; a batch of "
            f"{request.whole_batch_size} samples has to be a multiple of that (batch_size)"
        )


def evaluated_with_replicas(
    request: PlacementRequest,
    where: Map,
    replicas: Replicas,
    chosen_by: Placement | None = None,
    form: FormatName | None = None,
) -> MapCosts:
    """Return the costs and the faults of a map with replicas, whose names are all known.

    Args:
        request: the question.
        where: the device of each layer.
        replicas: which ``require_replicas_fit`` accepts.
        chosen_by: the placement from which the map comes. Objective ``step`` uses its schedule if
            the request allows it, and else the best schedule for the map.
        form: the format to which the user restricts placements, if any.
    """
    if is_by_stage(where, replicas):
        return evaluated_by_stage(request, where, replicas, chosen_by)
    whole = faults_of_all(request, where, replicas)
    exchange = replication_of(request, replicas)
    if exchange is None:
        return MapCosts(tuple(whole))
    members, value = min(
        _evaluated_runs(request, where, replicas, exchange, chosen_by, form),
        key=lambda one: (sum(len(member.faults) for member in one[0]), one[1] or inf),
    )
    faults = (*whole, *_faults_of_each(members))
    if value is None:
        return MapCosts(faults)
    loads = {load.device: load for member in members for load in member.loads}
    return MapCosts(faults, value, members[0].stages, all_loads(request, loads))


def _faults_of_each(members: Sequence[MapCosts]) -> Iterator[Fault]:
    """Yield the faults of all pipelines; broken rules about layers only of the first one."""
    for number, member in enumerate(members):
        for fault in member.faults:
            if number == 0 or fault.kind not in ("colocation-broken", "too-many-layers"):
                yield fault


def _evaluated_runs(
    request: PlacementRequest,
    where: Map,
    replicas: Replicas,
    exchange: Replication,
    chosen_by: Placement | None,
    form: FormatName | None,
) -> Iterator[tuple[list[MapCosts], float | None]]:
    """Yield, for each way to run the map, the costs of its pipelines and the objective."""
    maps = maps_of_pipelines(where, replicas)
    for run in _runs(request, replicas, chosen_by):
        asked = _questions(request, replicas, run)
        members = [
            costs_of_map(one, own, form, exchange) for one, own in zip(asked, maps, strict=True)
        ]
        yield members, _value(request, members)


def _runs(
    request: PlacementRequest, replicas: Replicas, chosen_by: Placement | None
) -> Iterator[_Run]:
    """Yield what may be chosen besides the map."""
    members = next(iter(replicas.values()))
    if request.objective == "throughput":
        assert request.schedule != "auto"  # only objective ``step`` chooses it
        chunks = request.chunks // len(members)
        yield _Run(chunks, request.schedule, request.constraints.contiguous)
        return
    chunks = request.whole_batch_size // sum(one.samples for one in members)
    allowed = [*kinds(request)]
    chosen = [(chosen_by.contiguous, chosen_by.schedule)] if chosen_by is not None else []
    for contiguous, order in chosen if set(chosen) & set(allowed) else allowed:
        yield _Run(chunks, order, contiguous)


def _questions(
    request: PlacementRequest, replicas: Replicas, run: _Run
) -> Iterator[PlacementRequest]:
    """Yield what each pipeline is asked for."""
    pipelines = pipelines_of(request, replicas)
    for pipeline in pipelines:
        asked = question_of_replicas(request, pipeline, len(pipelines), *run)
        if asked is None:
            sizes = sorted({one.batch_size for one in (request.profile, *request.profiles)})
            raise InputError(
                f"a replica computes {pipeline[0].samples} samples, and micro-batches of {sizes} "
                "samples were measured; give shares between these, or profile others (batch_sizes)"
            )
        yield asked


def _value(request: PlacementRequest, members: Sequence[MapCosts]) -> float | None:
    """Return the objective of all pipelines, which wait for the slowest one."""
    results = [member.result for member in members if member.result is not None]
    if len(results) < len(members):
        return None
    slowest = max(result.objective_value for result in results)
    if request.objective == "throughput":
        return slowest / len(members)
    if len(results[0].stages) > 1:
        return slowest
    # whole copies of the model may be on unlike devices, with unlike shares
    return step_of_shares(request, results).isolated_ms
