"""The referee's own check of replicas: shares, devices, and the exchange of gradients.

Each pipeline is checked as a placement of its own, of a batch of its shares. Then the exchange is
computed a second time by the formulas in the docstrings of ``solver/replicas``.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from placer.schedule.gradient_pieces import ADD_BYTES_PER_S
from placer.schema import (
    DeviceLoad,
    Edge,
    Layer,
    Link,
    Placement,
    PlacementRequest,
    Profile,
)
from placer.solver.referee.claims import equal, near, require
from placer.solver.referee.map_rules import check_used
from placer.solver.referee.memory import stage_pieces
from placer.solver.referee.step import StepReading

Rate = tuple[float, float]
"""Latency of an exchange in ms, and ms for each byte of gradients."""


class PipelineClaim(NamedTuple):
    """One of several pipelines, as a placement of its own.

    Attributes:
        request: what the pipeline is asked for; the profile is of its share.
        placement: what is claimed of it.
    """

    request: PlacementRequest
    placement: Placement


@dataclass(frozen=True)
class ExchangeReading:
    """The exchange of one device in a step, in milliseconds."""

    reduce_ms: float
    exposed_ms: float
    gather_ms: float
    waits_ms: float
    optimizer_ms: float


def check_replicas(request: PlacementRequest, placement: Placement) -> None:
    """Raise unless replicas are allowed, have devices of their own, and share micro-batches."""
    rules = request.constraints
    require(
        request.replicas != "never"
        and request.is_training
        and not (rules.pinned or rules.forbidden),
        "replicas are given, but the request allows none",
    )
    require(
        request.objective in ("step", "throughput"),
        f"replicas are given under objective {request.objective!r}",
    )
    _check_devices(request, placement)
    _check_shares(request, placement)


def _check_devices(request: PlacementRequest, placement: Placement) -> None:
    """Raise unless each stage has equally many replicas, each on a device of its own."""
    claimed = placement.replicas
    equal("devices of replicas", sorted(claimed), sorted(set(placement.layer_devices.values())))
    counts = {len(members) for members in claimed.values()}
    require(
        len(counts) == 1 and counts != {1},
        f"stages have {sorted(counts)} replicas, not equally many",
    )
    used = [replica.device for members in claimed.values() for replica in members]
    require(len(set(used)) == len(used), "a device holds several replicas")
    require(
        set(used) <= {device.name for device in request.devices},
        "a replica is on a device that the cluster does not have",
    )
    for device, members in claimed.items():
        equal(f"first replica of {device}", members[0].device, device)
    check_used(request.constraints, len(used))


def _check_shares(request: PlacementRequest, placement: Placement) -> None:
    """Raise unless the shares add up to a micro-batch, and are equal where they have to be."""
    claimed = placement.replicas
    shares = {tuple(one.samples for one in members) for members in claimed.values()}
    require(len(shares) == 1, f"stages share micro-batches in several ways: {sorted(shares)}")
    (samples,) = shares
    equal("sum of shares", sum(samples), placement.batch_size)
    if len(claimed) > 1 or request.objective == "throughput":
        require(
            len(set(samples)) == 1, f"pipelines of several stages have unequal shares {samples}"
        )


def pipelines(request: PlacementRequest, placement: Placement) -> list[PipelineClaim]:
    """Return each pipeline as a placement of its own; shares have been checked."""
    shares = [one.samples for one in next(iter(placement.replicas.values()))]
    profiles = {
        samples: with_part_of_optimizer(_profile_of(request, samples), len(shares))
        for samples in set(shares)
    }
    return [
        _pipeline(request, placement, number, len(shares), samples, profiles[samples])
        for number, samples in enumerate(shares)
    ]


def _pipeline(
    request: PlacementRequest,
    placement: Placement,
    number: int,
    count: int,
    samples: int,
    profile: Profile,
) -> PipelineClaim:
    name_of = {first: members[number].device for first, members in placement.replicas.items()}
    own = set(name_of.values())
    links = tuple(
        link for link in request.placed_on.links if link.source in own and link.target in own
    )
    cluster = request.placed_on.model_copy(
        update={
            "devices": tuple(device for device in request.devices if device.name in own),
            "links": links,
        }
    )
    rules = request.constraints.model_copy(update={"max_devices": None, "min_devices": None})
    changed = {"profile": profile, "profiles": (), "cluster": cluster, "constraints": rules}
    if request.objective == "step":
        changed["batch_size"] = placement.chunks * samples
    else:
        equal("chunks of all replicas", placement.chunks * count, request.chunks)
        changed["chunks"] = placement.chunks
    asked = request.model_copy(update=changed)
    claimed = {
        "layer_devices": {layer: name_of[d] for layer, d in placement.layer_devices.items()},
        "stages": tuple(name_of[device] for device in placement.stages),
        "recompute": tuple(name for name in placement.recompute if name in own),
        "devices": tuple(load for load in placement.devices if load.device in own),
        "batch_size": samples,
    }
    return PipelineClaim(asked, placement.model_copy(update=claimed))


def check_idle(request: PlacementRequest, placement: Placement) -> None:
    """Raise unless devices without a replica are idle, and the busiest ones are marked."""
    used = {replica.device for members in placement.replicas.values() for replica in members}
    equal(
        "devices",
        [load.device for load in placement.devices],
        [device.name for device in request.devices],
    )
    for load in placement.devices:
        if load.device not in used:
            empty = DeviceLoad(
                device=load.device,
                layers=0,
                compute_ms=0.0,
                send_ms=0.0,
                receive_ms=0.0,
                load_ms=0.0,
                memory=load.memory.model_copy(
                    update=dict.fromkeys(type(load.memory).model_fields, 0)
                ),
                limit_bytes=load.limit_bytes,
            )
            equal(f"load of {load.device}", load, empty)


# Profiles of shares


def _profile_of(request: PlacementRequest, samples: int) -> Profile:
    """Return the profile of a share, between two measured ones if it was not measured."""
    known = {profile.batch_size: profile for profile in (request.profile, *request.profiles)}
    if samples in known:
        return known[samples]
    below = [size for size in known if size < samples]
    above = [size for size in known if size > samples]
    require(bool(below and above), f"a share of {samples} samples is outside the measured sizes")
    low, high = known[max(below)], known[min(above)]
    a, b = low.batch_size, high.batch_size

    def whole(small: int, large: int) -> int:
        # rounded up, also where the larger micro-batch has less
        return small + -((small - large) * (samples - a) // (b - a))

    def layer(small: Layer, large: Layer) -> Layer:
        changed: dict[str, object] = {}
        for name in Layer.model_fields:
            one, other = getattr(small, name), getattr(large, name)
            if name in ("forward_ms", "backward_ms", "weight_grad_ms"):
                changed[name] = {
                    kind: one[kind] * (b - samples) / (b - a)
                    + other[kind] * (samples - a) / (b - a)
                    for kind in one.keys() & other.keys()
                }
            elif name.endswith(("saved_bytes", "workspace_bytes", "deferred_bytes")):
                changed[name] = whole(one, other)
        return small.model_copy(update=changed)

    def edge(small: Edge, large: Edge) -> Edge:
        equal("ends of a value", (small.source, small.targets), (large.source, large.targets))
        names = "bytes", "gradient_bytes", "retained_bytes"
        changed = {name: whole(getattr(small, name), getattr(large, name)) for name in names}
        return small.model_copy(update=changed)

    return low.model_copy(
        update={
            "batch_size": samples,
            "layers": tuple(map(layer, low.layers, high.layers)),
            "edges": tuple(edge(*pair) for pair in zip(low.edges, high.edges, strict=True)),
        }
    )


def with_part_of_optimizer(profile: Profile, count: int) -> Profile:
    """Return the profile of a replica that owns one of so many parts of the parameters."""
    layers = []
    for layer in profile.layers:
        state, rest = divmod(layer.optimizer_bytes, count)
        times = {kind: time_ms / count for kind, time_ms in layer.optimizer_ms.items()}
        changed = {"optimizer_bytes": state + (rest > 0), "optimizer_ms": times}
        layers.append(layer.model_copy(update=changed))
    share = profile.optimizer_workspace_ratio / count
    return profile.model_copy(update={"layers": tuple(layers), "optimizer_workspace_ratio": share})


# The exchange


def rates(request: PlacementRequest, placement: Placement) -> dict[str, tuple[Rate, Rate]]:
    """Return the rates of reducing and of gathering, by device that holds a replica."""
    links = {(link.source, link.target): link for link in request.placed_on.links}
    found: dict[str, tuple[Rate, Rate]] = {}
    for members in placement.replicas.values():
        names = [replica.device for replica in members]
        for way in itertools.permutations(names, 2):
            require(way in links, f"replicas on {way[0]!r} and {way[1]!r} have no link")
        reduce, _ = rates_while_computing(request, names)
        found |= dict.fromkeys(names, (reduce, _rate(names, links, is_computing=False)))
    return found


def rates_while_computing(request: PlacementRequest, names: Sequence[str]) -> tuple[Rate, Rate]:
    """Return the rates of reducing and of gathering among devices that compute meanwhile."""
    links = {(link.source, link.target): link for link in request.placed_on.links}
    latency_ms, byte_ms = _rate(names, links, is_computing=True)
    adding_ms = 3e3 * (len(names) - 1) / len(names) / ADD_BYTES_PER_S
    return (latency_ms, byte_ms + adding_ms), (latency_ms, byte_ms)


def _rate(names: Sequence[str], links: Mapping[tuple[str, str], Link], is_computing: bool) -> Rate:
    latency = per_byte = 0.0
    for name in names:
        others = [other for other in names if other != name]
        for ways in ([(name, other) for other in others], [(other, name) for other in others]):
            waits = seconds = 0.0
            for way in ways:
                link = links[way]
                loads = [link.bidirectional_computing] if is_computing else []
                loads += [link.bidirectional]
                loads += [link.computing] if is_computing else []
                rate = next((load for load in loads if load is not None), link)
                waits += rate.latency_s
                seconds += 1 / rate.bandwidth_bytes_per_s / len(names)
            latency, per_byte = max(latency, waits), max(per_byte, seconds)
    return 1e3 * latency, 1e3 * per_byte


def _time(rate: Rate, size: int) -> float:
    return rate[0] + rate[1] * size if size else 0.0


def exchange_readings(
    request: PlacementRequest, reading: StepReading, rate_of: Mapping[str, tuple[Rate, Rate]]
) -> dict[str, ExchangeReading]:
    """Return the exchange of each device of a pipeline, from the order of its passes.

    Args:
        request: what the pipeline is asked for.
        reading: of its step, before optimizers include exchanges.
        rate_of: by device, the rates of reducing and of gathering.
    """
    passes_end, ended = _pass_ends(reading)
    pieces: dict[str, list[_Piece]] = defaultdict(list)
    for stage in sorted(ended):
        pieces[reading.device_of(stage)] += _pieces(request, reading, stage, ended[stage])
    found = {}
    for device, end_ms in passes_end.items():
        reduce, gather = rate_of[device]
        own = pieces[device]
        found[device] = ExchangeReading(
            reduce_ms=sum(_time(reduce, piece.bytes) for piece in own),
            exposed_ms=max(0.0, _reductions_end(own, reduce) - end_ms),
            gather_ms=sum(_time(gather, piece.bytes) for piece in own),
            waits_ms=_waits_ms(own, gather),
            optimizer_ms=reading.optimizer_of(device),
        )
    return found


class _Piece(NamedTuple):
    """Consecutive layers of a stage whose gradients are exchanged together.

    Attributes:
        bytes: their gradients.
        forward_ms: their forward passes of a micro-batch.
        ready_ms: when their gradients are complete.
    """

    bytes: int
    forward_ms: float
    ready_ms: float


def _pass_ends(reading: StepReading) -> tuple[dict[str, float], dict[int, float]]:
    """Return when the passes of each device end, and the last backward pass of each stage."""
    last = "weights" if reading.plan.split else "backward"
    clock: dict[str, float] = defaultdict(float)
    ended: dict[int, float] = {}
    for event in reading.plan.issue:
        device = reading.device_of(event.stage)
        clock[device] += reading.duration(event.stage, event.phase)
        if event.phase == last:
            ended[event.stage] = clock[device]
    return clock, ended


def _pieces(
    request: PlacementRequest, reading: StepReading, stage: int, ended_ms: float
) -> list[_Piece]:
    """Return the pieces of a stage in execution order; a stage without gradients is one piece."""
    kinds = {device.name: device.type for device in request.devices}
    kind = kinds[reading.device_of(stage)]
    layers = [layer for layer in request.profile.layers if reading.stage_of[layer.name] == stage]
    times = [reading.last_pass_ms(layer) for layer in layers]
    ranges = stage_pieces(request, layers) or [range(len(layers))]
    return [
        _Piece(
            sum(layers[index].grad_bytes for index in piece),
            sum(layers[index].forward_ms[kind] for index in piece),
            ended_ms - sum(times[: piece.start]),
        )
        for piece in reversed(ranges)
    ]


def _reductions_end(pieces: Sequence[_Piece], rate: Rate) -> float:
    """Return when the last reduction of a device ends; negative infinity without gradients."""
    waiting = sorted((piece.ready_ms, piece.bytes) for piece in pieces if piece.bytes)
    # a reduction and all that follow it begin when its gradients are complete, or later
    return max(
        (
            ready_ms + sum(_time(rate, size) for _, size in waiting[number:])
            for number, (ready_ms, _) in enumerate(waiting)
        ),
        default=-inf,
    )


def _waits_ms(pieces: Sequence[_Piece], rate: Rate) -> float:
    """Return how long first forward passes wait for parameters, which arrive piece by piece."""
    gathered = itertools.accumulate((_time(rate, piece.bytes) for piece in pieces), initial=0.0)
    forwards = itertools.accumulate((piece.forward_ms for piece in pieces[:-1]), initial=0.0)
    # the passes of a piece wait until it is there
    return max(there - run for there, run in zip(gathered, [0.0, *forwards], strict=True))


def with_amortised_exchange(
    request: PlacementRequest, where: Mapping[str, str], rate_of: Mapping[str, tuple[Rate, Rate]]
) -> PlacementRequest:
    """Return the question whose backward passes include their part of the step's exchange."""
    kinds = {device.name: device.type for device in request.devices}
    layers = []
    for layer in request.profile.layers:
        device = where[layer.name]
        reduce, gather = rate_of[device]
        part_ms = layer.grad_bytes * (reduce[1] + gather[1]) / request.chunks
        times = {kinds[device]: layer.backward_ms[kinds[device]] + part_ms}
        layers.append(layer.model_copy(update={"backward_ms": times}))
    profile = request.profile.model_copy(update={"layers": tuple(layers)})
    return request.model_copy(update={"profile": profile})


class _StepTimes(NamedTuple):
    """The times of a step with exchanges, in milliseconds.

    Attributes:
        isolated_ms: from an idle cluster to the last device's end.
        steady_state_ms: from one step to the next.
        optimizer_ms: the longest time of an optimizer.
        exchange_ms: the exchange of the device that shows most of it.
        exposed_ms: the part of ``exchange_ms`` that lengthens the step.
    """

    isolated_ms: float
    steady_state_ms: float
    optimizer_ms: float
    exchange_ms: float
    exposed_ms: float


def check_step(
    request: PlacementRequest,
    placement: Placement,
    readings: Sequence[StepReading],
    exchanged: Sequence[Mapping[str, ExchangeReading]],
    by_stage: bool = False,
) -> float:
    """Raise on what is said of the exchange and is not so; return the time of a step.

    Args:
        request: the whole question.
        placement: the answer.
        readings: by pipeline, its step, without exchanges.
        exchanged: by pipeline and device, the exchange.
        by_stage: whether stages have numbers of replicas of their own, and measured shares.
    """
    step = placement.step
    assert step is not None  # check() has looked
    has_stages = len(placement.stages) > 1
    times = (_times_of_pipelines if has_stages else _times_of_copies)(readings, exchanged)
    known = sorted({profile.batch_size for profile in (request.profile, *request.profiles)})
    members = () if by_stage else next(iter(placement.replicas.values()))
    samples = {replica.samples for replica in members}
    equal("step.kind", step.kind, request.step_kind)
    near("step.optimizer_ms", step.optimizer_ms, times.optimizer_ms)
    equal(
        "step.measured_batch_sizes",
        list(step.measured_batch_sizes),
        [] if samples <= set(known) else known,
    )
    scale = 1e-9 * max(times.isolated_ms, 1e-9)
    near("step.reduction_ms", step.reduction_ms, times.exchange_ms, scale)
    hidden_ms = times.exchange_ms - times.exposed_ms
    near("step.reduction_hidden_ms", step.reduction_hidden_ms, hidden_ms, scale)
    for name in ("isolated_ms", "steady_state_ms"):
        claimed = getattr(step, name)
        near(f"step.{name}", -1.0 if claimed is None else claimed, getattr(times, name))
    equal("step.in_flight", step.in_flight, readings[0].plan.in_flight)
    return times.steady_state_ms if request.step_kind == "steady-state" else times.isolated_ms


def _times_of_pipelines(
    readings: Sequence[StepReading], exchanged: Sequence[Mapping[str, ExchangeReading]]
) -> _StepTimes:
    """Return the times of pipelines of several stages, whose devices exchange in idle time."""
    for reading, devices in zip(readings, exchanged, strict=True):
        for device, one in devices.items():
            reading.set_optimizer(device, one.exposed_ms + one.optimizer_ms + one.waits_ms)
    every = [one for devices in exchanged for one in devices.values()]
    longest = max(
        every, key=lambda one: (one.exposed_ms + one.waits_ms, one.reduce_ms + one.gather_ms)
    )
    return _StepTimes(
        isolated_ms=max(reading.isolated_ms for reading in readings),
        steady_state_ms=max(reading.steady_state_ms for reading in readings),
        optimizer_ms=max(one.optimizer_ms for one in every),
        exchange_ms=longest.reduce_ms + longest.gather_ms,
        exposed_ms=longest.exposed_ms + longest.waits_ms,
    )


def _times_of_copies(
    readings: Sequence[StepReading], exchanged: Sequence[Mapping[str, ExchangeReading]]
) -> _StepTimes:
    """Return the times of whole copies of the model, whose devices may be unlike.

    Each device waits for the slowest one in the exchange.
    """
    every = [one for devices in exchanged for one in devices.values()]
    passes = [reading.isolated_ms - reading.optimizer_ms() for reading in readings]
    ends = [
        one.waits_ms + time_ms + one.exposed_ms for time_ms, one in zip(passes, every, strict=True)
    ]
    optimizer_ms = max(one.optimizer_ms for one in every)
    return _StepTimes(
        isolated_ms=max(ends) + optimizer_ms,
        steady_state_ms=max(ends) + optimizer_ms,
        optimizer_ms=optimizer_ms,
        exchange_ms=every[0].reduce_ms + every[0].gather_ms,
        exposed_ms=max(ends) - max(passes),
    )
