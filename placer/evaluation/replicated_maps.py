"""Evaluation of maps whose stages several devices hold: each pipeline, and what they exchange.

replicas by stage ──▶ R pipelines ──▶ each one's question and costs ──┬──▶ loads and faults
                         └──▶ what the replicas of a stage exchange ──┘    objective of all
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from placer.errors import InputError
from placer.evaluation.faults import (
    Map,
    Replicas,
    device_count_faults,
    device_faults,
    exchange_faults,
)
from placer.evaluation.map_costs import MapCosts, costs_of_map
from placer.exports.formats import format_named
from placer.schema import DeviceLoad, Fault, Placement, PlacementRequest, Schedule
from placer.schema.base import FormatName
from placer.schema.request import OBJECTIVES_OF_REPLICAS
from placer.solver.replicas.replica_answer import all_loads, step_of_shares
from placer.solver.replicas.replica_shapes import (
    pipelines_of,
    question_of_replicas,
    replication_of,
)
from placer.solver.replicas.replication import Replication
from placer.solver.step.choices import kinds


class ReplicatedCosts(NamedTuple):
    """A map with replicas, evaluated.

    Attributes:
        value: the objective; None if a link is missing.
        stages: the devices of the first pipeline, in pipeline order.
        loads: of each device of the request; empty if a link is missing.
        faults: the violated requirements.
    """

    value: float | None
    stages: tuple[str, ...]
    loads: tuple[DeviceLoad, ...]
    faults: tuple[Fault, ...]


class _Run(NamedTuple):
    """What is chosen besides the map."""

    chunks: int
    order: Schedule
    contiguous: bool | None


def require_replicas_fit(
    request: PlacementRequest, where: Map, replicas: Replicas, form: FormatName | None = None
) -> None:
    """Raise an InputError unless replicas fit a map and can share the request's micro-batches.

    Args:
        request: the question.
        where: the device of each layer.
        replicas: by device of the map.
        form: the format to which the user restricts placements, if any.
    """
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
    if sorted(replicas) != held:
        raise InputError(
            f"replicas are given for {sorted(replicas)}, and the map has layers on {held}; give the"
            " replicas of each of these devices, itself among them"
        )
    _require_pipelines(replicas)
    _require_shares(request, replicas)


def _require_pipelines(replicas: Replicas) -> None:
    counts = {name: len(members) for name, members in replicas.items()}
    if len(set(counts.values())) > 1 or min(counts.values()) < 2:
        raise InputError(
            f"the devices have {counts} replicas; give two or more, and equally many of each"
        )
    for name, members in replicas.items():
        if members[0].device != name:
            raise InputError(
                f"replicas of {name!r}: the first one is {members[0].device!r}; give {name!r} first"
            )
    used = [one.device for members in replicas.values() for one in members]
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
) -> ReplicatedCosts:
    """Return the costs and the faults of a map with replicas, whose names are all known.

    Args:
        request: the question.
        where: the device of each layer.
        replicas: which ``require_replicas_fit`` accepts.
        chosen_by: the placement from which the map comes. Objective ``step`` uses its schedule if
            the request allows it, and else the best schedule for the map.
        form: the format to which the user restricts placements, if any.
    """
    whole = _faults_of_all(request, where, replicas)
    exchange = replication_of(request, replicas)
    if exchange is None:
        return ReplicatedCosts(None, (), (), tuple(whole))
    members, value = min(
        _evaluated_runs(request, where, replicas, exchange, chosen_by, form),
        key=lambda one: (sum(len(member.faults) for member in one[0]), one[1] or inf),
    )
    faults = [*whole, *_faults_of_each(members)]
    loads = {load.device: load for member in members for load in member.loads}
    return ReplicatedCosts(
        value,
        members[0].stages if value is not None else (),
        all_loads(request, loads) if value is not None else (),
        tuple(faults),
    )


def _faults_of_all(request: PlacementRequest, where: Map, replicas: Replicas) -> list[Fault]:
    """Return the violated requirements that are about all pipelines together."""
    devices = {one.device for members in replicas.values() for one in members}
    return [
        *device_count_faults(request, devices),
        *(
            fault
            for own in _maps(request, where, replicas)
            for fault in device_faults(request, own)
        ),
        *exchange_faults(request, replicas),
    ]


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
    maps = _maps(request, where, replicas)
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


def _maps(request: PlacementRequest, where: Map, replicas: Replicas) -> list[dict[str, str]]:
    """Return the map of each pipeline."""
    first, *_ = pipelines = pipelines_of(request, replicas)
    twins = [
        {one.device: mine.device for one, mine in zip(first, pipeline, strict=True)}
        for pipeline in pipelines
    ]
    return [{layer: twin[device] for layer, device in where.items()} for twin in twins]


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
