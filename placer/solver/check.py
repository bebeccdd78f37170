"""The referee: recomputes every cost and every rule of a placement from its request alone.

It shares nothing with the solver, and implements the formulas in the docstring of ``costs.py`` a
second time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import inf

from placer.errors import PlacementError
from placer.exports.restriction import expressible
from placer.schema import Device, DeviceLoad, Layer, Placement, PlacementRequest
from placer.schema.base import PROVEN_GAP
from placer.solver.referee import (
    by_stage,
    generation,
    in_flight,
    optimizer_state,
    recompute,
    replicas,
    step,
    tiers,
)
from placer.solver.referee.claims import close, equal, near, require
from placer.solver.referee.latency import latency_ms
from placer.solver.referee.loads import Times, busiest_ms, times_of
from placer.solver.referee.map_rules import check_rules, check_stages, runs_forwards
from placer.solver.referee.memory import Flight, Memory
from placer.solver.referee.sharding import check_sharded

FEW = 2_000
"""Assignments up to which the referee tries all of them against an infeasible claim."""

Where = Mapping[str, str]


def check(request: PlacementRequest, placement: Placement) -> None:
    """Raise on the first contradiction between a request and its placement.

    Args:
        request: the question.
        placement: the answer. Of one without layers, only that no single device, and where there
            are few assignments no assignment at all, would have answered.

    Raises:
        PlacementError: what is claimed, and what is true.
    """
    equal("id", placement.id, request.content_hash())
    check_sharded(request, placement)
    _check_placement(expressible(optimizer_state.answered(request, placement)), placement)
    if optimizer_state.rules_out_devices(request, placement):
        _check_infeasible(request, placement)
    shares = [{one.samples for one in members} for members in placement.replicas.values()]
    require(
        request.for_format is None or all(len(own) == 1 for own in shares),
        f"replicas have unequal shares, which {request.for_format} has not",
    )


def _check_placement(request: PlacementRequest, placement: Placement) -> None:
    """Check everything but the sharded step."""
    if request.objective == "generation":
        _check_generation(request, placement)
        return
    if by_stage.is_by_stage(placement):
        _check_by_stage(request, placement)
        return
    if placement.replicas:
        _check_replicas(request, placement)
        return
    require(placement.generation is None, "generation comes with objective 'generation' alone")
    asked = step.chosen(request, placement) if request.objective == "step" else request
    if asked is None:
        raise PlacementError(
            f"{placement.chunks} micro-batches under {placement.schedule!r} cannot be chosen"
        )
    _check_header(asked, placement)
    if placement.status in ("infeasible", "unknown"):
        _check_nothing_claimed(placement)
        if placement.status == "infeasible":
            _check_infeasible(request, placement)
        return
    where = placement.layer_devices
    require(
        (placement.step is not None) == (request.objective == "step"),
        "step comes with objective 'step' alone",
    )
    asked, reading = _check_map(asked, placement)
    _check_loads(asked, where, placement, reading)
    tiers.check_resting(asked, placement)
    require(
        _within_bottleneck(asked, where),
        f"a device is busy for more than {request.bottleneck_ms} ms",
    )
    _check_value(placement, _objective(asked, where, placement, reading))
    _check_comparisons(request, placement)
    if reading is not None:
        step.check_said(request, reading, placement)


def _check_generation(request: PlacementRequest, placement: Placement) -> None:
    """Check a placement for generations: as a placement of a mean pass, then what it adds."""
    equal("objective", placement.objective, request.objective)
    require(
        (placement.generation is not None) == bool(placement.layer_devices),
        "generation comes with every placement, and only with one",
    )
    asked = generation.mean_pass(request)
    _check_placement(asked, generation.claimed_for_mean_pass(request, asked, placement))
    _check_ties(request, placement)
    _check_limits(request, placement)
    if not placement.layer_devices:
        return
    value = generation.value_ms(request, asked, placement)
    _check_value(placement, value)
    single = placement.single_device
    if single is not None and value:
        near("speedup", placement.speedup or 0.0, single.objective_value / value)
    generation.check_report(request, placement, value)


def _check_replicas(request: PlacementRequest, placement: Placement) -> None:
    """Check a placement with replicas: each pipeline by itself, then what they exchange."""
    is_step = request.objective == "step"
    require((placement.step is not None) == is_step, "step comes with objective 'step' alone")
    replicas.check_replicas(request, placement)
    replicas.check_idle(request, placement)
    rate_of = replicas.rates(request, placement)
    largest = max(load.load_ms for load in placement.devices)
    readings, exchanged, busiest = [], [], 0.0
    for claimed in replicas.pipelines(request, placement):
        own = claimed.placement
        asked = step.chosen(claimed.request, own) if is_step else claimed.request
        if asked is None:
            raise PlacementError(
                f"a pipeline cannot run {own.chunks} times {own.batch_size} samples"
            )
        _check_header(asked, own)
        where = own.layer_devices
        repeated, reading = _check_map(asked, own)
        if reading is None:
            repeated = replicas.with_amortised_exchange(repeated, where, rate_of)
            busiest = max(busiest, busiest_ms(repeated, where))
        else:
            readings.append(reading)
            exchanged.append(replicas.exchange_readings(asked, reading, rate_of))
        _check_loads(repeated, where, own, reading, largest)
    if is_step:
        _check_value(placement, replicas.check_step(request, placement, readings, exchanged))
        step.check_choices(request, placement)
    else:
        _check_value(placement, busiest / _replicas(placement))
    _check_comparisons(request, placement)


def _check_by_stage(request: PlacementRequest, placement: Placement) -> None:
    """Check stages with unlike numbers of replicas: as a placement of one unit, then the shares."""
    is_step = request.objective == "step"
    require((placement.step is not None) == is_step, "step comes with objective 'step' alone")
    found = by_stage.claim(request, placement)
    asked, own = found.request, found.placement
    _check_header(asked, own)
    where, stages = own.layer_devices, own.stages
    first_of = by_stage.firsts(found)
    require(by_stage.in_order(found, own.recompute), "some replicas of a stage recompute")
    again = tuple(dict.fromkeys(first_of.get(name, name) for name in own.recompute))
    first_recompute = own.model_copy(update={"recompute": again})
    _check_recompute(asked, where, first_recompute)
    repeated = recompute.repeated(asked, where, again)
    check_rules(repeated, where, contiguous=True)
    check_stages(repeated, where, own)
    rate_of = by_stage.rates(request, found)
    reading = by_stage.UnitReading(found, repeated)
    in_flight.check_in_flight(repeated, own, reading)
    times = times_of(repeated, where, found.members, found.units)
    if not is_step:
        by_stage.with_exchange(repeated, found, times, rate_of)
    equal("devices", [load.device for load in own.devices], [one.name for one in asked.devices])
    largest = max(load.load_ms for load in own.devices)
    layers = _by_device(asked, where)
    for device, load in zip(asked.devices, own.devices, strict=True):
        first = first_of.get(device.name)
        equal(f"layers of {device.name}", load.layers, len(layers[first]) if first else 0)
        _check_load(repeated, times[device.name], load)
        equal(f"bottleneck of {device.name}", load.bottleneck, close(load.load_ms, largest))
        if first is None:
            equal(f"memory of {device.name}", load.memory.total_bytes, 0)
            continue
        memory, share = by_stage.memory_of(found, first), found.share(first)
        apart = in_flight.backwards(asked, own, first)
        flight = own.in_flight[stages.index(first)] * share
        at_first = load.model_copy(update={"device": first})
        _check_state(memory.request, memory.layers_of(first), at_first, memory)
        backwards = None if apart is None else apart * share
        held = device.model_copy(update={"name": first})
        _check_memory(memory, flight, backwards, first_recompute, held, at_first)
    if is_step:
        exchanged = replicas.exchange_readings(asked, reading, rate_of)
        _check_value(
            placement,
            replicas.check_step(request, placement, [reading], [exchanged], by_stage=True),
        )
        step.check_choices(request, placement)
    else:
        _check_value(placement, largest / found.units)
    _check_comparisons(request, placement)


def _check_map(
    request: PlacementRequest, placement: Placement
) -> tuple[PlacementRequest, step.StepReading | None]:
    """Check the device of each layer, the stages, and which devices recompute.

    Returns:
        The request with the passes that devices repeat, and the step of the map, if one is asked
        for.
    """
    where = placement.layer_devices
    _check_recompute(request, where, placement)
    repeated = recompute.repeated(request, where, placement.recompute)
    check_rules(repeated, where, placement.contiguous)
    check_stages(repeated, where, placement)
    reading = _reading(repeated, where, placement.stages, placement.in_flight or None)
    in_flight.check_in_flight(repeated, placement, reading)
    return repeated, reading


def _check_comparisons(request: PlacementRequest, placement: Placement) -> None:
    """Check what a placement says of one device, of equal placements and of other requests."""
    _check_single_device(request, placement)
    _check_ties(request, placement)
    _check_limits(request, placement)


def _replicas(placement: Placement) -> int:
    """Return the number of replicas of each stage."""
    return max(map(len, placement.replicas.values()), default=1)


def _check_header(request: PlacementRequest, placement: Placement) -> None:
    equal("objective", placement.objective, request.objective)
    equal("training", placement.training, request.is_training)
    equal("chunks", placement.chunks, request.chunks)
    equal("schedule", placement.schedule, request.schedule)
    equal("granularity", placement.granularity, request.profile.granularity)
    equal("batch_size", placement.batch_size, request.profile.batch_size)
    equal("batch_options", placement.batch_options, request.profile.batch_options)
    if request.constraints.contiguous is not None:
        equal("contiguous", placement.contiguous, request.constraints.contiguous)


def _check_nothing_claimed(placement: Placement) -> None:
    for name in ("layer_devices", "devices", "objective_value", "gap", "speedup"):
        require(
            not getattr(placement, name), f"status is {placement.status!r}, but {name} is given"
        )
    require(
        (placement.status == "infeasible") == (placement.infeasible is not None),
        "infeasible needs its reason",
    )


def _check_infeasible(request: PlacementRequest, placement: Placement) -> None:
    for where in _few_assignments(request):
        if any(
            _meets_all(asked, where, contiguous) for asked, contiguous in _whole(request, placement)
        ):
            raise PlacementError(
                f"status is 'infeasible', but this placement meets every requirement: {where}"
            )


def _whole(request: PlacementRequest, placement: Placement) -> list[tuple[PlacementRequest, bool]]:
    """Return all that may be chosen but the map, with whether stages must be contiguous."""
    if request.objective != "step":
        return [(request, placement.contiguous)]
    return [(asked, bool(asked.constraints.contiguous)) for asked in step.choices(request)]


def _few_assignments(request: PlacementRequest) -> Iterator[Where]:
    layers = [layer.name for layer in request.profile.layers]
    devices = [device.name for device in request.devices]
    if len(devices) ** len(layers) <= FEW:
        for choice in itertools.product(devices, repeat=len(layers)):
            yield dict(zip(layers, choice, strict=True))
    else:
        for device in devices:
            yield dict.fromkeys(layers, device)


def _meets_all(request: PlacementRequest, where: Where, contiguous: bool) -> bool:
    try:
        check_rules(request, where, contiguous)
    except PlacementError:
        return False
    used = list(dict.fromkeys(where.values()))
    memory = Memory(request, where, contiguous)
    orders = (
        itertools.permutations(used) if contiguous and _order_matters(request) else [tuple(used)]
    )
    slowest = recompute.repeated(request, where, [d for d in used if recompute.may(request, d, 1)])
    by_segment = in_flight.by_segment(request, contiguous)
    return _within_bottleneck(slowest, where) and any(
        (not contiguous or not _order_matters(request) or runs_forwards(request, where, order))
        and all(
            recompute.least(
                request,
                memory,
                d.name,
                flight or in_flight.least(request, order, contiguous, d.name),
            )
            <= d.usable_bytes
            for d in request.devices
        )
        for order in orders
        for flight in (step.possible_flights(request, where, order) if by_segment else [None])
    )


def _order_matters(request: PlacementRequest) -> bool:
    return request.is_training and request.schedule != "fill-drain" and request.chunks > 1


def _check_recompute(request: PlacementRequest, where: Where, placement: Placement) -> None:
    """Refuse recomputation on idle devices or where not allowed, and its absence where required."""
    for device in placement.recompute:
        require(device in where.values(), f"{device!r} recomputes, but holds no layer")
        may = recompute.may(request, device, 1) and not in_flight.by_segment(
            request, placement.contiguous
        )
        require(may, f"{device!r} recomputes, which was not asked for")
    for device in set(where.values()) - set(placement.recompute):
        require(
            not recompute.must(request, device),
            f"{device!r} does not recompute, which was asked for",
        )


# Loads and memory


def _check_loads(
    request: PlacementRequest,
    where: Where,
    placement: Placement,
    reading: step.StepReading | None,
    largest: float | None = None,
) -> None:
    """Check the load of each device; ``largest`` is the load of the busiest one if not of these."""
    equal(
        "devices",
        [load.device for load in placement.devices],
        [device.name for device in request.devices],
    )
    if largest is None:
        largest = max(load.load_ms for load in placement.devices)
    memory = Memory(request, where, placement.contiguous, replicas=_replicas(placement))
    times, layers = times_of(request, where), _by_device(request, where)
    saved = tiers.saved_bytes(request, where, placement)
    for device, load in zip(request.devices, placement.devices, strict=True):
        equal(f"layers of {device.name}", load.layers, len(layers[device.name]))
        _check_load(request, times[device.name], load)
        load = _with_all_parameters(load, saved.get(device.name, 0))
        _check_state(request, layers[device.name], load, memory)
        flight = in_flight.claimed(request, placement, device.name, reading)
        backwards = in_flight.backwards(request, placement, device.name)
        _check_memory(memory, flight, backwards, placement, device, load)
        needed = load.memory.total_bytes - saved.get(device.name, 0)
        require(
            needed <= load.limit_bytes,
            f"{device.name} needs {needed} bytes; its limit is {load.limit_bytes}",
        )
        equal(f"bottleneck of {device.name}", load.bottleneck, close(load.load_ms, largest))


def _check_load(request: PlacementRequest, times: Times, load: DeviceLoad) -> None:
    near(f"compute_ms of {load.device}", load.compute_ms, times.compute_ms)
    near(f"send_ms of {load.device}", load.send_ms, times.send_ms)
    near(f"receive_ms of {load.device}", load.receive_ms, times.receive_ms)
    near(f"load_ms of {load.device}", load.load_ms, times.load_ms(request))


def _within_bottleneck(request: PlacementRequest, where: Where) -> bool:
    """Return whether no device is busier than is asked for."""
    if request.bottleneck_ms is None:
        return True
    busiest = busiest_ms(request, where)
    return busiest <= request.bottleneck_ms or close(busiest, request.bottleneck_ms)


def _by_device(request: PlacementRequest, where: Where) -> dict[str, list[Layer]]:
    layers: dict[str, list[Layer]] = defaultdict(list)
    for layer in request.profile.layers:
        layers[where[layer.name]].append(layer)
    return layers


def _check_state(
    request: PlacementRequest, layers: list[Layer], load: DeviceLoad, memory: Memory
) -> None:
    copied = dict(zip(("param_bytes", "grad_bytes"), memory.copies(load.device), strict=True))
    copied["grad_bytes"] += memory.exchange_bytes(load.device)
    for kind in ("param_bytes", "buffer_bytes", "grad_bytes", "optimizer_bytes"):
        counts = request.is_training or kind in ("param_bytes", "buffer_bytes")
        true = (sum(getattr(layer, kind) for layer in layers) + copied.get(kind, 0)) * counts
        equal(f"{kind} of {load.device}", getattr(load.memory, kind), true)


def _check_memory(
    memory: Memory,
    flight: Flight,
    backwards: int | None,
    placement: Placement,
    device: Device,
    load: DeviceLoad,
) -> None:
    again = device.name in placement.recompute
    total = memory.total(device.name, flight, again, backwards)
    equal(f"memory of {device.name}", load.memory.total_bytes, total)
    split, splits = (
        (load.memory.activation_bytes, load.memory.workspace_bytes),
        memory.splits(device.name, flight, again, backwards),
    )
    require(
        split in splits,
        f"activation_bytes, workspace_bytes of {device.name}: {split} is not one of {splits}",
    )
    equal(
        f"limit_bytes of {device.name}",
        load.limit_bytes,
        device.memory_bytes - device.reserve_bytes,
    )


def _with_all_parameters(load: DeviceLoad, saved_bytes: int) -> DeviceLoad:
    """Return a load as if its parameters that rest on the host were on the device."""
    memory = load.memory
    param_bytes = memory.param_bytes + saved_bytes
    return load.model_copy(
        update={"memory": memory.model_copy(update={"param_bytes": param_bytes})}
    )


def _reading(
    request: PlacementRequest,
    where: Where,
    stages: tuple[str, ...],
    held: Sequence[int] | None = None,
) -> step.StepReading | None:
    """Return the step of a map whose stages hold so many micro-batches, where a step is asked for.

    Made once for each map.
    """
    return step.StepReading(request, where, stages, held) if request.objective == "step" else None


# Objective


def _check_value(placement: Placement, true: float) -> None:
    """Raise unless the objective is what is true, and bound, gap and status belong to it."""
    value, bound, gap = placement.objective_value, placement.bound, placement.gap
    if value is None or bound is None or gap is None:
        raise PlacementError("a placement comes with objective_value, bound and gap")
    near("objective_value", value, true)
    require(bound <= value, f"bound {bound} is above objective_value {value}")
    near("gap", gap, (value - bound) / value if value else 0.0, absolute=1e-9)
    require(
        (gap <= PROVEN_GAP) == (placement.status == "optimal"),
        f"status is {placement.status!r} at gap {gap}",
    )


def _objective(
    request: PlacementRequest, where: Where, placement: Placement, reading: step.StepReading | None
) -> float:
    if reading is not None:
        return reading.step_ms
    if request.objective == "latency":
        return latency_ms(request, where, placement.resting)
    if request.objective == "devices":
        return float(len(set(where.values())))
    if request.objective == "memory":
        memory = Memory(request, where, placement.contiguous)
        names = [device.name for device in request.devices]
        flights = [in_flight.claimed(request, placement, name) for name in names]
        again = [name in placement.recompute for name in names]
        return float(max(map(memory.total, names, flights, again)))
    return busiest_ms(request, where)


def _check_single_device(request: PlacementRequest, placement: Placement) -> None:
    single, value = placement.single_device, placement.objective_value
    if single is None or value is None:
        raise PlacementError("a placement comes with what one device does")
    by_load = request.objective == "devices"
    require(
        (single.load_ms is not None) == by_load,
        "single_device.load_ms comes with objective 'devices' alone",
    )
    claimed = single.objective_value if single.load_ms is None else single.load_ms
    choices = [
        one
        for asked, contiguous in _whole(request, placement)
        for one in _alone(asked, placement, contiguous)
    ]
    # A device that fits counts before a quicker one that does not.
    fitting = [choice for choice in choices if not choice[0]] or choices
    best = min(value for _, value, _ in fitting)
    near("what single_device does", claimed, best)
    require(not by_load or single.objective_value == 1, "single_device: one device is one")
    require(
        any(
            (s, d) == (single.missing_bytes, single.device) and close(v, best)
            for s, v, d in fitting
        ),
        f"single_device {single.device!r} with {single.missing_bytes} bytes short "
        f"is not the best of {choices}",
    )
    equal("single_device.fits", single.fits, single.missing_bytes == 0)
    if value and request.objective not in ("memory", "devices"):
        near("speedup", placement.speedup if placement.speedup is not None else inf, best / value)


def _alone(
    request: PlacementRequest, placement: Placement, contiguous: bool
) -> list[tuple[int, float, str]]:
    """Return, by device that holds all layers, its excess bytes, its objective, and its name."""
    choices = []
    alone_as: dict[tuple[str, int], tuple[int, float]] = {}
    for device in request.devices:
        kind = (device.type, device.usable_bytes)
        if kind not in alone_as:
            where = {layer.name: device.name for layer in request.profile.layers}
            alone, memory = (device.name,), Memory(request, where, contiguous)
            reading = _reading(request, where, alone)
            changed = {"stages": alone, "contiguous": contiguous, "in_flight": (), "resting": {}}
            lone = placement.model_copy(update=changed)
            if request.is_training and contiguous:
                least = in_flight.least(request, alone, contiguous, device.name)
                lone = lone.model_copy(update={"in_flight": (least,)})
            flight = in_flight.claimed(request, lone, device.name, reading)
            again = alone if recompute.alone(request, memory, device, flight) else ()
            need = memory.total(device.name, flight, bool(again))
            lone = lone.model_copy(update={"recompute": again})
            repeated = recompute.repeated(request, where, again)
            if again:
                reading = _reading(repeated, where, alone)
            by_load = request.objective == "devices"
            value = (
                busiest_ms(repeated, where)
                if by_load
                else _objective(repeated, where, lone, reading)
            )
            alone_as[kind] = (max(0, need - device.usable_bytes), value)
        choices.append((*alone_as[kind], device.name))
    return choices


def _check_ties(request: PlacementRequest, placement: Placement) -> None:
    equal("whether ties are broken", placement.tie_breaks is not None, request.break_ties)
    if placement.tie_breaks is not None:
        transfers = sum(load.send_ms + load.receive_ms for load in placement.devices)
        near("tie_breaks.transfer_ms", placement.tie_breaks.transfer_ms, transfers, absolute=1e-12)
        computes = [load.compute_ms for load in placement.devices if load.layers]
        near(
            "tie_breaks.imbalance_ms",
            placement.tie_breaks.imbalance_ms,
            max(computes) - min(computes),
            absolute=1e-9 * max(computes),
        )


def _check_limits(request: PlacementRequest, placement: Placement) -> None:
    require(request.explain or placement.limits is None, "limits are given, but were not asked for")
    for help in placement.limits.improvements if placement.limits else ():
        near(
            f"speedup of {help.change}",
            help.speedup * help.objective_value,
            placement.objective_value or 0.0,
        )
        require(help.speedup > 1, f"{help.change} is said to help, at a speedup of {help.speedup}")
