"""Refinement of a placement by running its stages as the executor does.

    profile ─▶ solve ─▶ placement ─▶ times of its stages ─▶ corrected profile ─▶ solve ...

``correction`` holds the loop, ``stage_times`` the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from placer.capture import input_forms
from placer.capture.argument_checks import (
    require_loss_function,
    require_loss_with_target,
    require_module,
)
from placer.capture.batch_dims.declared_layout import input_layout
from placer.capture.loss_functions import LossFunction
from placer.capture.pytrees import flatten
from placer.errors import InputError, kind_of
from placer.executor.engine.compiled_segments import backend_of
from placer.profiler.profile import profile as measure_profile
from placer.refinement.correction import improve
from placer.refinement.stage_times import Stages, device_times
from placer.schema import Constraints, Placement, PlacementRequest, Profile, RefineOptions
from placer.schema.options import combined
from placer.schema.refinement import Refinement
from placer.schema.request import OBJECTIVES_OF_REPLICAS
from placer.solver import costs
from placer.solver.problem import Problem
from placer.solver.solve import solve


def refine(
    placement: Placement,
    model: nn.Module,
    example_inputs: Any,
    *,
    profile: Profile | None = None,
    request: PlacementRequest | None = None,
    options: RefineOptions | None = None,
    **fields: Any,
) -> Refinement:
    """Measure a placement's stages, correct the profile by them, and solve again.

    This repeats until the placement stays the same. The model is left unchanged, and where it is:
    parameters, gradients, buffers and modes; so are the random number generators.

        refine(placement, model, inputs, profile=profile)
        refine(placement, model, inputs, request=request, rounds=5)

    Args:
        placement: a placement of the model, as ``suggest`` or ``solve`` returned it.
        model: the model.
        example_inputs: one micro-batch, as for ``profile``. If the placement has replicas, the
            share of one of them; where stages have different numbers of replicas, one unit.
        profile: the profile that the placement was solved from. None: the profile of the request,
            or a new one of the placement's layers.
        request: the request that the placement answers, for its constraints. None: a request like
            the placement.
        options: the loss, how to measure, and when to stop.
        fields: single fields of ``options``, for short.

    Returns:
        The best placement that was measured, the corrected profile, and the prediction and the
        measurement of every round.

    Raises:
        InputError: the placement is empty, or its replicas are on unlike devices or have unlike
            shares; the profile has other layers, another model or another batch; the inputs hold no
            tensor; a loss is given without a target, or the reverse; or an option cannot be used.
        ProfilingError: the model cannot be captured, so its stages cannot be run.
    """
    if not isinstance(placement, Placement):
        raise InputError(
            f"placement is {kind_of(placement)}; give one that suggest or solve returned"
        )
    if not placement.layer_devices:
        raise InputError(
            f"the placement is {placement.status} and places no layer, so there is nothing to "
            "measure; give one whose status is optimal or feasible"
        )
    _refuse_unequal_shares(placement)
    if placement.resting:
        raise InputError(
            "parameters rest on the host in this placement, which refine does not measure; give "
            "one that was solved without host_memory_bytes and disk_bytes"
        )
    if placement.optimizer_state == "host":
        raise InputError(
            "optimizer state rests on the host in this placement, which refine does not measure; "
            "give one that was solved with optimizer_state='device'"
        )
    if placement.objective == "generation":
        raise InputError(
            "the placement's objective is 'generation', whose two passes refine does not measure; "
            "give a placement of objective 'latency' or 'throughput'"
        )
    how = combined(RefineOptions, options, fields, refine)
    loss_fn, target = how.loss_fn, how.target
    require_module(model)
    require_loss_with_target(loss_fn, target)
    if loss_fn is not None:
        require_loss_function(loss_fn)
    backend = backend_of(how.compile)
    _refuse_others(profile, request)
    if request is None:
        request = _request(
            placement, profile or _profile(placement, model, example_inputs, loss_fn, target)
        )
    elif profile is not None:
        request = request.model_copy(update={"profile": profile})
    _refuse_unlike_devices(request, placement)
    # one micro-batch size only: the measurements correct no other profile
    counts = set(placement.replicas_by_stage)
    allowed = {"replicas": "never" if counts == {1} else "auto" if len(counts) == 1 else "by-stage"}
    request = _of_one_size(request, placement).model_copy(update=allowed)
    _refuse_unlike(request.profile, placement, model, example_inputs)
    timed = how.timer or device_times
    stages = Stages(
        model, example_inputs, loss_fn, target, how.repeats, backend, timed, request.profile
    )
    return improve(placement, request, stages.measure, solve, how.rounds, how.tolerance)


def _share(placement: Placement) -> int:
    """Return the samples that a device computes at once."""
    return placement.batch_size // math.lcm(*placement.replicas_by_stage)


def _refuse_unequal_shares(placement: Placement) -> None:
    """Raise an InputError unless the replicas of each stage have equal shares."""
    for device, members in placement.replicas.items():
        samples = [one.samples for one in members]
        if len(set(samples)) > 1:
            raise InputError(
                f"the replicas of {device} compute {samples} samples; refine measures equal "
                "shares: give a placement that was solved with replicas='auto' on alike devices, "
                "or with replicas='never'"
            )


def _refuse_unlike_devices(request: PlacementRequest, placement: Placement) -> None:
    """Raise an InputError for replicas where the measurement of one does not hold for the others.

    The request must have the devices of all replicas.
    """
    if not placement.replicas:
        return
    types = {device.name: device.type for device in request.devices}
    for members in placement.replicas.values():
        if unknown := [one.device for one in members if one.device not in types]:
            raise InputError(
                f"the placement has a replica on {unknown[0]!r}, which the request has not (its "
                f"devices: {', '.join(types)}); give the request that the placement answers"
            )
    if len(kinds := sorted(set(types.values()))) > 1:
        raise InputError(
            f"the placement has replicas, and the devices are of the types {', '.join(kinds)}; "
            "refine measures replicas only among devices of one type: give a placement that was "
            "solved with replicas='never'"
        )
    if request.objective not in OBJECTIVES_OF_REPLICAS or not request.is_training:
        kind = "training" if request.is_training else "inference"
        raise InputError(
            f"the placement has replicas, and the request asks for objective {request.objective!r} "
            f"of {kind}, where none has; give the request that the placement answers"
        )


def _refuse_others(profile: Any, request: Any) -> None:
    for name, given, kind in (
        ("profile", profile, Profile),
        ("request", request, PlacementRequest),
    ):
        if not (given is None or isinstance(given, kind)):
            wanted = kind.__name__
            raise InputError(
                f"{name} is {kind_of(given)}; give a {wanted}, which "
                f"{wanted}.model_validate_json(text) makes of JSON"
            )


def _of_one_size(request: PlacementRequest, placement: Placement) -> PlacementRequest:
    """Return the request reduced to the placed micro-batch size, which alone is measured."""
    if not request.profiles:
        return request
    sizes = {profile.batch_size: profile for profile in (request.profile, *request.profiles)}
    placed = sizes.get(_share(placement), request.profile)
    chosen = {"profile": placed, "profiles": (), "cluster": request.placed_on}
    return request.model_copy(update={**chosen, "batch_size": request.whole_batch_size})


def _refuse_unlike(
    profile: Profile, placement: Placement, model: nn.Module, example_inputs: Any
) -> None:
    """Raise an InputError for a profile of other layers or another micro-batch size.

    The measured times would correct figures that do not belong to them.
    """
    known = {layer.name for layer in profile.layers}
    unknown = next((name for name in placement.layer_devices if name not in known), None)
    if unknown is not None:
        raise InputError(
            f"the placement has a layer {unknown!r}, and the profile has none; give the profile "
            "that it was solved from"
        )
    leaves, _ = flatten(input_forms.call_arguments(example_inputs, "example_inputs"))
    input_forms.require_tensors(example_inputs, leaves, "example_inputs")
    samples = input_layout(model, example_inputs, profile.batch_options, "example_inputs").size
    # a profile without a hash was written by hand and may omit its batch size
    if profile.graph_hash and profile.batch_size != samples:
        raise InputError(
            f"example_inputs are a micro-batch of {samples}, and the profile is of one of "
            f"{profile.batch_size}; give both of one size"
        )
    if profile.graph_hash and profile.batch_size != _share(placement):
        owner = "replica" if placement.replicas else "placement"
        raise InputError(
            f"the {owner} is of micro-batches of {_share(placement)}, and the profile is of "
            f"one of {profile.batch_size}; give the profile of the {owner}'s size"
        )


def _profile(
    placement: Placement,
    model: nn.Module,
    example_inputs: Any,
    loss_fn: LossFunction | None,
    target: Any,
) -> Profile:
    """Return a profile of the placement's layers and devices, with the loss if it has a target."""
    replicas = [one.device for members in placement.replicas.values() for one in members]
    names = list(dict.fromkeys([*placement.layer_devices.values(), *replicas]))
    has_loss = placement.training and loss_fn is not None
    return measure_profile(
        model,
        example_inputs,
        names,
        training=placement.training,
        granularity=tuple(placement.layer_devices),
        loss_fn=loss_fn if has_loss else None,
        target=target if has_loss else None,
        batch_options=placement.batch_options,
    )


def _request(placement: Placement, profile: Profile) -> PlacementRequest:
    """Return a request that the placement could answer, reconstructed from its fields."""
    where = placement.layer_devices
    # a placement that splits tied layers was solved from an untied profile
    split = any(len({where.get(layer) for layer in tie.layers}) > 1 for tie in profile.tied)
    request = PlacementRequest(
        profile=profile.untied() if split else profile,
        objective=placement.objective,
        constraints=Constraints(recompute="auto" if placement.recompute else "never"),
        training=placement.training,
        # micro-batches of the profiled size, in all pipelines
        chunks=placement.chunks * math.lcm(*placement.replicas_by_stage),
        schedule=placement.schedule,
        step_kind="isolated" if placement.step is None else placement.step.kind,
    )
    if not placement.contiguous and (placement.replicas or _is_but_for_groups(request, where)):
        return request
    rules = request.constraints.model_copy(update={"contiguous": placement.contiguous})
    return request.model_copy(update={"constraints": rules})


def _is_but_for_groups(request: PlacementRequest, where: Mapping[str, str]) -> bool:
    """Return whether a placement is contiguous except for colocated layers.

    This is the solver's default without a constraint.
    """
    problem = Problem.from_request(request).but_for_groups()
    number = {device.name: index for index, device in enumerate(request.devices)}
    if problem is None or not number.keys() >= set(where.values()):
        return False
    return (
        costs.evaluate(problem, [number[where[layer.name]] for layer in request.profile.layers])
        is not None
    )
