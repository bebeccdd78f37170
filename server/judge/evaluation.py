"""Evaluation of maps that users made, by the cost model that the solver minimises."""

from __future__ import annotations

import pickle
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from placer.errors import InputError
from placer.schema import (
    Comparison,
    DeviceLoad,
    Evaluation,
    Fault,
    FaultKind,
    Move,
    Placement,
    PlacementRequest,
)
from placer.schema.base import read_json
from placer.utils.units import count_text

from ..problem import Problem, clip, invalid_body
from ..workers.solving import read_request
from ..workers.worker import Report

MAX_MAPS = 8

# Largest number of layers that a fault names; further ones are counted.
MAX_NAMED = 20

MAX_MOVES = 1000

Map = dict[str, str]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EvaluateBody(_Body):
    """Map to evaluate.

    Attributes:
        request: Request that the map answers; if omitted, the request of the placement `?id=`.
        layer_devices: Device of each layer.
    """

    request: PlacementRequest | None = None
    layer_devices: Map


class CompareBody(_Body):
    """Maps to compare with one another and with the placements `?id=`.

    Attributes:
        request: Request for which all maps are evaluated; if omitted, the first placement's
            request.
        maps: Device of each layer, by the name of the map.
    """

    request: PlacementRequest | None = None
    maps: Annotated[dict[str, Map], Field(max_length=MAX_MAPS)] = {}


class StoredPlacement(NamedTuple):
    """A placement of the store and its request, each as JSON."""

    id: str
    placement: bytes
    request: bytes


class EvaluationInput(NamedTuple):
    """Input of an evaluation: the body that was sent, and the placements that it names."""

    body: bytes
    stored: tuple[StoredPlacement, ...]


def evaluate_task(payload: bytes, report: Report, stop: threading.Event) -> bytes | Problem:
    """Evaluate a map, and return an Evaluation as JSON or the body's problem."""
    # Safe to unpickle: this service pickled it. The client's bytes inside it are only parsed.
    given: EvaluationInput = pickle.loads(payload)
    try:
        body = read_json(EvaluateBody, given.body, strict=True)
    except ValidationError as error:
        return invalid_body(error, EvaluateBody)
    request = body.request or _request_of(given.stored)
    return (
        evaluate(request, body.layer_devices, _known_best(request, given.stored))
        .model_dump_json()
        .encode()
    )


def compare_task(payload: bytes, report: Report, stop: threading.Event) -> bytes | Problem:
    """Compare maps, and return a Comparison as JSON or the body's problem."""
    given: EvaluationInput = pickle.loads(payload)
    try:
        body = read_json(CompareBody, given.body or b"{}", strict=True)
    except ValidationError as error:
        return invalid_body(error, CompareBody)
    request = body.request or _request_of(given.stored)
    placements = {
        stored.id: Placement.model_validate_json(stored.placement) for stored in given.stored
    }
    maps = {name: placement.layer_devices for name, placement in placements.items()}
    return compare(request, {**maps, **body.maps}, placements).model_dump_json().encode()


def _request_of(stored: Sequence[StoredPlacement]) -> PlacementRequest:
    if not stored:
        raise InputError("no request is given: send one in the body, or name a placement with ?id=")
    return read_request(stored[0].request)


def _known_best(request: PlacementRequest, stored: Sequence[StoredPlacement]) -> Placement | None:
    key = request.content_hash()
    # An answer to a request of an older schema version has another id than the request has today.
    found = [
        Placement.model_validate_json(one.placement)
        for one in stored
        if one.id == key or read_request(one.request).content_hash() == key
    ]
    return found[0] if found and found[0].objective_value is not None else None


def compare(
    request: PlacementRequest,
    maps: Mapping[str, Map],
    placements: Mapping[str, Placement] | None = None,
) -> Comparison:
    """Evaluate maps for one request, and list where they differ.

    Args:
        request: The request.
        maps: Device of each layer, by the name of the map.
        placements: Placements from which maps come, by the map's name. Objective ``step`` evaluates
            such a map with the placement's micro-batches and schedule, if the request allows them,
            and other maps with the best choice.

    Raises:
        InputError: Fewer than two maps are given.
    """
    if len(maps) < 2:
        raise InputError(
            f"a comparison needs two or more maps, and {count_text(len(maps), 'map')} came; give"
            " more, as ?id= of placements or as maps in the body"
        )
    of = placements or {}
    for name, placement in of.items():
        if placement.replicas:
            raise InputError(
                f"placement {name} has replicas, and a map has none; compare placements that were"
                " solved with replicas='never'"
            )
    evaluations = [evaluate(request, where, chosen_by=of.get(name)) for name, where in maps.items()]
    values = [
        (one.objective_value, name)
        for name, one in zip(maps, evaluations, strict=True)
        if one.valid and one.objective_value is not None
    ]
    every = [*dict.fromkeys(layer.name for layer in request.profile.layers)]
    rows = [
        Move(layer=layer, devices=tuple(where.get(layer) for where in maps.values()))
        for layer in every
    ]
    moves = [row for row in rows if len(set(row.devices)) > 1]
    return Comparison(
        names=tuple(maps),
        evaluations=tuple(evaluations),
        best=min(values)[1] if values else None,
        moves=tuple(moves[:MAX_MOVES]),
        moved_layers=len(moves),
    )


def evaluate(
    request: PlacementRequest,
    where: Map,
    best: Placement | None = None,
    chosen_by: Placement | None = None,
) -> Evaluation:
    """Return the cost of a map and its faults.

    The map has no replicas, even if the request allows them.

    Args:
        request: Request that the map answers.
        where: Device of each layer.
        best: Known placement of the request.
        chosen_by: Placement from which the map comes. Objective ``step`` uses its micro-batches and
            schedule if the request allows them, and else the best choice for the map.
    """
    from placer.solver import costs
    from placer.solver.answer import device_loads, single_device
    from placer.solver.problem import Problem as Indexed
    from placer.solver.step.choices import best_for, question_of

    faults = [*_name_faults(request, where)]
    if faults:
        # Unknown names make every other check meaningless.
        return Evaluation(valid=False, faults=tuple(faults), objective=request.objective)
    if request.objective == "step":
        request = (question_of(request, chosen_by) if chosen_by is not None else None) or best_for(
            request, where
        )
    problem = Indexed.from_request(request)
    faults += _constraint_faults(request, where)
    faults += _link_faults(request, where)
    index = {device.name: number for number, device in enumerate(problem.devices)}
    assignment = [index[where[layer.name]] for layer in problem.layers]
    result = costs.evaluate(problem, assignment)
    if result is None and costs.passable(problem, assignment):
        faults.append(_not_contiguous(request, where))
        result = costs.evaluate(replace(problem, contiguous=False), assignment)
    if result is None:
        return Evaluation(valid=False, faults=tuple(faults), objective=request.objective)
    loads = device_loads(problem, assignment, result)
    faults += _memory_faults(loads)
    faults += _time_faults(request, loads)
    value = result.objective_value
    known = best.objective_value if best is not None else None
    return Evaluation(
        valid=not faults,
        faults=tuple(faults),
        objective=request.objective,
        objective_value=value,
        stages=tuple(problem.devices[number].name for number in result.stages),
        devices=loads,
        single_device=single_device(problem),
        best_id=best.id if best is not None else None,
        best_value=known,
        bound=best.bound if best is not None else None,
        above_best=(value - known) / known if known else None,
    )


def _name_faults(request: PlacementRequest, where: Map) -> Iterator[Fault]:
    layers = {layer.name for layer in request.profile.layers}
    devices = [device.name for device in request.devices]
    if missing := [layer.name for layer in request.profile.layers if layer.name not in where]:
        yield _fault("layer-missing", missing, (), f"{_listed(missing)} {_have(missing)} no device")
    if unknown := [name for name in where if name not in layers]:
        yield _fault(
            "layer-unknown", unknown, (), f"{_listed(unknown)}: the profile has no such layer"
        )
    unknown_devices = defaultdict(list)
    for layer, device in where.items():
        if device not in devices:
            unknown_devices[device].append(layer)
    for device, held in list(unknown_devices.items())[:MAX_NAMED]:
        detail = (
            f"{clip(device, 80)!r} is not a device of the cluster, which has {_listed(devices)}"
        )
        yield _fault("device-unknown", held, (device,), detail)


def _constraint_faults(request: PlacementRequest, where: Map) -> Iterator[Fault]:
    yield from _layer_faults(request, where)
    yield from _group_faults(request, where)
    yield from _count_faults(request, where)


def _layer_faults(request: PlacementRequest, where: Map) -> Iterator[Fault]:
    rules = request.constraints
    for layer, device in rules.pinned.items():
        if where[layer] != device:
            detail = f"layer {layer!r} is pinned to {device!r}, but is on {where[layer]!r}"
            yield _fault("pin-broken", (layer,), (device, where[layer]), detail)
    everywhere = rules.forbidden.get("*", ())
    for layer, device in where.items():
        if device in everywhere or device in rules.forbidden.get(layer, ()):
            detail = f"layer {layer!r} must not be on {device!r}"
            yield _fault("device-forbidden", (layer,), (device,), detail)


def _group_faults(request: PlacementRequest, where: Map) -> Iterator[Fault]:
    for group in (*request.profile.colocated, *request.constraints.colocated):
        apart = sorted({where[layer] for layer in group})
        if len(apart) > 1:
            detail = f"{_listed(group)} must share a device, but are on {_listed(apart)}"
            yield _fault("colocation-broken", group, apart, detail)


def _count_faults(request: PlacementRequest, where: Map) -> Iterator[Fault]:
    rules = request.constraints
    used = sorted(set(where.values()))
    if rules.max_devices is not None and len(used) > rules.max_devices:
        detail = f"it uses {count_text(len(used), 'device')}; max_devices is {rules.max_devices}"
        yield _fault("too-many-devices", (), used, detail)
    if rules.min_devices is not None and len(used) < rules.min_devices:
        detail = f"it uses {count_text(len(used), 'device')}; min_devices is {rules.min_devices}"
        yield _fault("too-few-devices", (), used, detail)
    for device, count in Counter(where.values()).items():
        if rules.max_layers is not None and count > rules.max_layers:
            detail = (
                f"{device!r} holds {count_text(count, 'layer')}; max_layers is {rules.max_layers}"
            )
            held = [layer for layer, other in where.items() if other == device]
            yield _fault("too-many-layers", held, (device,), detail)


def _time_faults(request: PlacementRequest, loads: Sequence[DeviceLoad]) -> Iterator[Fault]:
    from placer.solver.problem import ROUNDING

    for load in loads if request.bottleneck_ms is not None else ():
        if load.load_ms > (request.bottleneck_ms or 0.0) * (1 + ROUNDING):
            detail = (
                f"{load.device!r} is busy for {load.load_ms:.6g} ms; {request.bottleneck_ms:g} ms"
                " are allowed"
            )
            yield _fault("too-slow", (), (load.device,), detail)


def _link_faults(request: PlacementRequest, where: Map) -> Iterator[Fault]:
    links = {(link.source, link.target) for link in request.placed_on.links}
    broken: dict[tuple[str, str], list[str]] = defaultdict(list)
    for edge in request.profile.edges:
        for target in {where[name] for name in edge.targets} - {where[edge.source]}:
            back = request.is_training and edge.gradient_bytes > 0
            for way in [
                (where[edge.source], target),
                *([(target, where[edge.source])] if back else []),
            ]:
                if way not in links:
                    broken[way].append(edge.source)
    for (source, target), values in broken.items():
        detail = (
            f"there is no link from {source!r} to {target!r}, which the values of"
            f" {_listed(values)} need"
        )
        yield _fault("link-missing", values, (source, target), detail)


def _not_contiguous(request: PlacementRequest, where: Map) -> Fault:
    """Return the fault of stages that form a cycle.

    Removing devices without an input, and then devices without an output, leaves the cycle.
    """
    feeds = {
        (where[edge.source], where[target])
        for edge in request.profile.edges
        for target in edge.targets
        if where[edge.source] != where[target]
    }
    left = set(where.values())
    while first := {
        device for device in left if not any((other, device) in feeds for other in left)
    }:
        left -= first
    while last := {
        device for device in left if not any((device, other) in feeds for other in left)
    }:
        left -= last
    detail = (
        f"the stages are not contiguous: values form a cycle between {_listed(sorted(left))}."
        " constraints.contiguous = false allows this, and the cost here assumes it"
    )
    return _fault("not-contiguous", (), sorted(left), detail)


def _memory_faults(loads: Iterable[DeviceLoad]) -> Iterator[Fault]:
    for load in loads:
        short = load.memory.total_bytes - load.limit_bytes
        if short > 0:
            detail = (
                f"{load.device!r} needs {load.memory.total_bytes} bytes, but may use"
                f" {load.limit_bytes}: {short} bytes are missing"
            )
            yield _fault("out-of-memory", (), (load.device,), detail, short)


def _fault(
    kind: FaultKind,
    layers: Sequence[str],
    devices: Sequence[str],
    detail: str,
    missing_bytes: int = 0,
) -> Fault:
    return Fault(
        kind=kind,
        detail=detail,
        layers=tuple(layers[:MAX_NAMED]),
        devices=tuple(devices),
        missing_bytes=missing_bytes,
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(clip(name, 80)) for name in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def _have(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"
