"""Evaluation of a map: its cost, its faults, and what the best placement would gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from placer.errors import InputError, kind_of
from placer.evaluation.faults import name_faults
from placer.evaluation.map_costs import costs_of_map
from placer.evaluation.replicated_maps import evaluated_with_replicas, require_replicas_fit
from placer.exports.formats import format_named
from placer.exports.restriction import expressible
from placer.schema import (
    Evaluation,
    LayerMap,
    Placement,
    PlacementRequest,
    Profile,
    SingleDevice,
    SolveOptions,
)
from placer.schema.base import FormatName
from placer.schema.judgement import Best
from placer.schema.options import combined
from placer.solver.answer import single_device
from placer.solver.latency import generation
from placer.solver.problem import Problem
from placer.solver.replicas.group_maps import Map
from placer.solver.solve import solve
from placer.solver.step import step_answer
from placer.solver.step.choices import best_for, question_of, questions
from placer.solver.step.state_on_host import asked_with
from placer.utils.option_checks import require_flags


def evaluate(
    request: PlacementRequest | Profile | Sequence[Profile],
    layer_devices: Mapping[str, str] | LayerMap | Placement | str,
    format: FormatName | None = None,
    *,
    best: bool | Placement = True,
    options: SolveOptions | None = None,
    **fields: Any,
) -> Evaluation:
    """Evaluate a map of your own by the cost model, and compare it with the best placement.

        placer.evaluate(profile, {"embed": "cuda:0", "head": "cuda:1"})
        placer.evaluate(profile, "8,9,9,6", "vllm", time_limit_s=5)

    Args:
        request: the request that the map answers; or a profile, or profiles of several micro-batch
            sizes, whose request has ``options``.
        layer_devices: the device of each layer; a ``placer.schema.LayerMap``, which may have
            replicas; a placement; or a text in ``format``. Stage i of a text is on the i-th device
            of the request.
        format: the format of another engine, as for ``Placement.export``. The best placement is
            then the best one that this format can express. None: the best of all placements.
        best: whether to solve for the best placement, in at most ``time_limit_s`` of the request;
            or a placement of the same request, to compare with instead of solving.
        options: what to solve, if ``request`` is no request.
        fields: single fields of ``options``, for short.

    Returns:
        The value of the objective, the load and memory of each device, and the violated
        requirements. Its field ``best`` has the best placement, its speedup over the map, and its
        text in ``format``.

    Raises:
        InputError: an argument has another type, the text is not in the format or does not fit the
            layers or devices, or the replicas do not fit the map, the batch or the objective.
    """
    if not isinstance(best, Placement):
        require_flags(best=best)
    asked = for_format(_request(request, options, fields), format)
    chosen_by = layer_devices if isinstance(layer_devices, Placement) else None
    found = evaluated(asked, map_of(asked, layer_devices), chosen_by=chosen_by)
    if isinstance(best, Placement):
        return with_best(found, asked, best)
    return with_best(found, asked, solve(asked)) if best else found


def _request(
    request: Any, options: SolveOptions | None, fields: Mapping[str, Any]
) -> PlacementRequest:
    """Return the request that the caller gave, or made of profiles and options."""
    profiles = [request] if isinstance(request, Profile) else request
    if isinstance(profiles, list | tuple) and all(isinstance(one, Profile) for one in profiles):
        by_size = sorted(profiles, key=lambda one: one.batch_size)
        return PlacementRequest.from_options(
            combined(SolveOptions, options, fields, evaluate), by_size
        )
    if not isinstance(request, PlacementRequest):
        raise InputError(
            f"request is {kind_of(request)}; give a placer.PlacementRequest, a placer.Profile, "
            "or a list of placer.Profile"
        )
    if options is not None or fields:
        given = next(iter(fields), "options")
        raise InputError(
            f"{given} is given together with a request, which has these fields itself; leave "
            f"{given} out, or give a profile"
        )
    return request


def for_format(request: PlacementRequest, format: FormatName | None) -> PlacementRequest:
    """Return the request for placements that a format can express.

    If the format allows any order of devices, so does the request, unless it says otherwise.

    Raises:
        InputError: the format is unknown, or the request has another one.
    """
    if format is None:
        return request
    form = format_named(format)
    if request.for_format not in (None, form.name):
        raise InputError(
            f"format is {format!r}, and for_format of the request is {request.for_format!r}; leave "
            "one of the two out"
        )
    rules = request.constraints
    if not (form.in_segments or form.contiguous) and rules.contiguous is None:
        # A map of the user may return to an earlier device, and the engine runs it.
        rules = rules.model_copy(update={"contiguous": False})
    return request.model_copy(update={"for_format": form.name, "constraints": rules})


def map_of(request: PlacementRequest, given: Any) -> LayerMap:
    """Return the map of a dictionary, a placement or a text.

    Args:
        request: the request that the map answers; its ``for_format`` is the format of a text.
        given: as for ``evaluate``.

    Raises:
        InputError: the value has another type; the text has no format, is not in it, or does not
            fit; or the placement has no map.
    """
    if isinstance(given, str):
        if request.for_format is None:
            raise InputError(
                f"layer_devices is the text {given!r:.80}, and no format is given; name its format,"
                " such as 'vllm'"
            )
        where = format_named(request.for_format).read(
            given,
            [layer.name for layer in request.profile.layers],
            [device.name for device in request.devices],
        )
        return LayerMap(layer_devices=where)
    if isinstance(given, Placement):
        if not given.layer_devices:
            raise InputError(
                f"the placement is {given.status}: it has no map; give one that has layer_devices"
            )
        return LayerMap(layer_devices=given.layer_devices, replicas=given.replicas)
    if isinstance(given, LayerMap):
        return given
    if not isinstance(given, Mapping):
        raise InputError(
            f"layer_devices is {kind_of(given)}; give a dictionary from layer to device, a "
            "LayerMap, a Placement, or a text together with its format"
        )
    for layer, device in given.items():
        if not isinstance(layer, str) or not isinstance(device, str):
            raise InputError(
                f"layer_devices has {layer!r:.80}: {device!r:.80}; give names of layers and devices"
            )
    return LayerMap(layer_devices=dict(given))


def evaluated(
    request: PlacementRequest,
    given: LayerMap,
    best: Placement | None = None,
    chosen_by: Placement | None = None,
) -> Evaluation:
    """Return the cost of a map and its faults.

    The map has its own replicas, or none, whatever the request allows. The engine of
    ``request.for_format`` runs it, so what ``expressible`` adds to the request counts.

    Args:
        request: Request that the map answers.
        given: Map.
        best: Known placement of the request.
        chosen_by: Placement from which the map comes. Objective ``step`` uses its micro-batches and
            schedule if the request allows them, and else the best choice for the map. Of
            optimizer state that may be on the host if nothing fits otherwise, its place is taken.

    Raises:
        InputError: The replicas do not fit the map, or the request has no replicas.
    """
    found = _evaluated(asked_with(request, chosen_by), given, best, chosen_by)
    is_open = request.optimizer_state == "auto" and chosen_by is None
    if is_open and any(fault.kind == "out-of-memory" for fault in found.faults):
        on_host = request.model_copy(update={"optimizer_state": "host"})
        return _evaluated(asked_with(on_host, None), given, best, None)
    return found


def _evaluated(
    request: PlacementRequest, given: LayerMap, best: Placement | None, chosen_by: Placement | None
) -> Evaluation:
    """Return what ``evaluated`` does, for a request whose optimizer state has its place."""
    form, request = request.for_format, expressible(request)
    where, replicas = given.layer_devices, given.replicas
    if replicas:
        require_replicas_fit(request, where, replicas, form)
    if request.objective == "generation":
        return _of_generations(request, given, form, best)
    nothing = Evaluation(valid=False, faults=(), objective=request.objective, format=form)
    faults = [*name_faults(request, where, replicas)]
    if faults:
        # Unknown names make every other check meaningless.
        return nothing.model_copy(update={"faults": tuple(faults)})
    if replicas:
        cost = evaluated_with_replicas(request, where, replicas, chosen_by, form)
    else:
        cost = costs_of_map(_chosen(request, where, chosen_by), where, form)
    found = nothing.model_copy(update={"faults": cost.faults})
    if cost.value is not None:
        found = found.model_copy(
            update={
                "valid": not cost.faults,
                "objective_value": cost.value,
                "stages": cost.stages,
                "devices": cost.loads,
                "single_device": _single_device(request),
            }
        )
    return _compared(found, best) if best is not None else found


def _chosen(request: PlacementRequest, where: Map, chosen_by: Placement | None) -> PlacementRequest:
    """Return the request with all chosen but the map."""
    if request.objective != "step":
        return request
    asked = None if chosen_by is None else question_of(request, chosen_by)
    return asked or best_for(request, where)


def _single_device(request: PlacementRequest) -> SingleDevice:
    """Return the best that one device does."""
    if request.objective != "step":
        return single_device(Problem.from_request(request))
    return step_answer.single_device([Problem.from_request(asked) for asked in questions(request)])


def _of_generations(
    request: PlacementRequest, given: LayerMap, form: FormatName | None, best: Placement | None
) -> Evaluation:
    """Return the evaluation of a map for generations: its mean pass, times the number of passes."""
    found, where = evaluated(generation.mean_pass_request(request), given), given.layer_devices
    changed: dict[str, Any] = {"objective": "generation", "format": form}
    if found.objective_value is not None:
        changed["objective_value"] = generation.generation_ms(request, where)
        changed["devices"] = generation.with_cache(request, where, found.devices)
        changed["single_device"] = generation.of_all(request, found.single_device)
    found = found.model_copy(update=changed)
    return _compared(found, best) if best is not None else found


def with_best(found: Evaluation, request: PlacementRequest, best: Placement) -> Evaluation:
    """Return an evaluation with the best placement, and what it would gain.

    Args:
        found: the evaluation of the map.
        request: the request, with the format in which to export the placement, if any.
        best: the best placement of the request; it may be infeasible.
    """
    value, known = found.objective_value, best.objective_value
    timed = found.objective not in ("memory", "devices")
    exported = request.for_format is not None and best.layer_devices
    gain = Best(
        placement=best,
        export=best.export(request.for_format) if request.for_format and exported else None,
        speedup=value / known if timed and value is not None and known else None,
    )
    return _compared(found, best).model_copy(update={"best": gain})


def _compared(found: Evaluation, best: Placement) -> Evaluation:
    """Return an evaluation with its difference to the best placement."""
    value, known = found.objective_value, best.objective_value
    return found.model_copy(
        update={
            "best_id": best.id,
            "best_value": known,
            "bound": best.bound,
            "above_best": (value - known) / known if value is not None and known else None,
        }
    )
