"""Correction of a profile by the measured times of whole stages.

    placement ──▶ measure its stages ──▶ correct the profile ──▶ solve again ──▶ unchanged? done
        ▲                                                             │
        └───────────────────────── a new placement ◀──────────────────┘

A stage's time is distributed over its layers in proportion to the original profile, because
consecutive layers take more or less time together than separately. The loss belongs to no layer.
Its time goes to the layer whose result it reads, unless the profile includes it already, and moves
with that layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

from placer.errors import InfeasibleError
from placer.schema import Layer, Placement, PlacementRequest, Profile
from placer.schema.base import LONGEST_MS
from placer.schema.refinement import Refinement, Round, StageTime, StopReason
from placer.solver.solve import predict_pipelines

ROUNDING = 1e-9
"""Relative tolerance of loads against the requested bottleneck."""

Measure = Callable[[Placement], Sequence[StageTime]]
Solve = Callable[[PlacementRequest], Placement]


def improve(
    placement: Placement,
    request: PlacementRequest,
    measure: Measure,
    solve: Solve,
    rounds: int = 3,
    tolerance: float = 0.01,
) -> Refinement:
    """Measure a placement, correct the profile and solve again, until the placement is stable.

    Args:
        placement: the first placement to measure; an answer to ``request``.
        request: the request whose profile is corrected.
        measure: returns the time of each stage of a placement.
        solve: answers a request.
        rounds: maximum number of measured placements, at least 1 (default 3).
        tolerance: stop if the relative gain of another round is below this (default 0.01).

    Returns:
        Every round, and the best measured placement.

    Raises:
        InfeasibleError: for the objective ``devices``, if no measured placement keeps within the
            bottleneck.
    """
    profile, done = request.profile, list[Round]()
    stop_reason: StopReason = "max-rounds"
    seen = set()
    while True:
        stages = [predicted(stage, profile, request) for stage in measure(placement)]
        before = profile
        profile = corrected(profile, request, stages)
        done.append(_round(placement, stages, request, before, profile, solve))
        seen.add(_map(placement))
        if len(done) == rounds:
            break
        following = solve(_question(request, profile))
        measured = inf if _over(request, done[-1].placement) else done[-1].measured_value
        if _settled(placement, following, measured, tolerance):
            stop_reason = "converged"
            # the new solution of the same map carries a bound for the corrected profile
            if _map(following) == _map(placement):
                done[-1] = done[-1].model_copy(update={"placement": following})
            break
        if _map(following) in seen:
            stop_reason = "repeated"
            break
        placement = following
    # placements within the requested bottleneck first, then the best value
    best = min(done, key=lambda one: (_over(request, one.placement), one.measured_value))
    if _over(request, best.placement):
        busiest = max(best.placement.devices, key=lambda load: load.load_ms)
        raise InfeasibleError(
            "no placement that was measured keeps within bottleneck_ms = "
            f"{request.bottleneck_ms:g}: the nearest keeps {busiest.device} busy for "
            f"{busiest.load_ms:.6g} ms; give more time"
        )
    return Refinement(
        placement=best.placement, profile=profile, rounds=tuple(done), stop_reason=stop_reason
    )


def corrected(profile: Profile, request: PlacementRequest, stages: Sequence[StageTime]) -> Profile:
    """Return the profile with each stage's layers scaled to the measured time.

    Args:
        profile: the profile to correct; layers outside the stages, and times on other device types,
            stay.
        request: its profile distributes a stage's time over the layers; its devices give the device
            types.
        stages: the measurements.
    """
    shares = {layer.name: layer for layer in request.profile.layers}
    types = {device.name: device.type for device in request.devices}
    changed = {layer.name: layer for layer in profile.layers}
    for stage in stages:
        members, kind = [shares[name] for name in stage.layers], types[stage.device]
        # If the profile includes the loss in a layer, it is distributed like that layer's time.
        apart = not request.profile.with_loss
        loss_forward_ms, loss_backward_ms = (
            stage.loss_forward_ms * apart,
            stage.loss_backward_ms * apart,
        )
        forward = _shared(
            [_at(layer.forward_ms, kind) for layer in members], stage.forward_ms - loss_forward_ms
        )
        backward = _shared(
            [_at(layer.backward_ms, kind) for layer in members],
            stage.backward_ms - loss_backward_ms,
        )
        weights = _weights(members, kind, backward, stage.weight_grad_ms)
        forward[-1] += loss_forward_ms
        backward[-1] += loss_backward_ms
        for name, *times in zip(stage.layers, forward, backward, weights, strict=True):
            changed[name] = _timed(changed[name], kind, *times)
    return profile.model_copy(
        update={"layers": tuple(changed[layer.name] for layer in profile.layers)}
    )


def predicted(stage: StageTime, profile: Profile, request: PlacementRequest) -> StageTime:
    """Return the stage with this profile's prediction.

    Args:
        stage: a measured stage.
        profile: the profile of the round.
        request: its devices give the device types.
    """
    kind = next(device.type for device in request.devices if device.name == stage.device)
    members = [layer for layer in profile.layers if layer.name in set(stage.layers)]
    return stage.model_copy(
        update={
            "predicted_forward_ms": sum(_at(layer.forward_ms, kind) for layer in members),
            "predicted_backward_ms": sum(_at(layer.backward_ms, kind) for layer in members)
            if request.is_training
            else 0.0,
        }
    )


def _shared(parts: Sequence[float], total: float) -> list[float]:
    """Return the total divided in proportion to the parts; evenly if all of them are zero."""
    total, whole = max(0.0, total), sum(parts)
    if not whole:
        return [total / len(parts)] * len(parts)
    return [total * part / whole for part in parts]


def _weights(
    members: Sequence[Layer], kind: str, backward: Sequence[float], measured: float | None
) -> list[float]:
    """Return the weight-gradient times, never more than the backward times.

    They are measured, or have the same share of the backward pass as before.
    """
    before = [layer.weight_half_ms(kind) for layer in members]
    if measured is not None:
        halves = _shared(before, measured)
    else:
        whole = [_at(layer.backward_ms, kind) for layer in members]
        halves = [
            now * half / was if was else 0.0
            for now, half, was in zip(backward, before, whole, strict=True)
        ]
    return [min(half, now) for half, now in zip(halves, backward, strict=True)]


def _timed(layer: Layer, kind: str, forward: float, backward: float, weights: float) -> Layer:
    update = {"forward_ms": {**layer.forward_ms, kind: forward}}
    if layer.backward_ms:
        update["backward_ms"] = {**layer.backward_ms, kind: backward}
        if layer.weight_grad_ms:
            update["weight_grad_ms"] = {**layer.weight_grad_ms, kind: weights}
    return layer.model_copy(update=update)


def _round(
    placement: Placement,
    stages: Sequence[StageTime],
    request: PlacementRequest,
    before: Profile,
    after: Profile,
    solve: Solve,
) -> Round:
    predicted = _valued(placement, _question(request, before), solve)
    measured = _valued(placement, _question(request, after), solve)
    assert predicted.objective_value is not None and measured.objective_value is not None
    return Round(
        placement=measured,
        stages=tuple(stages),
        predicted_value=predicted.objective_value,
        measured_value=measured.objective_value,
    )


def _over(request: PlacementRequest, placement: Placement) -> float:
    """Return by how many ms the busiest device exceeds the requested bottleneck; 0 if within it."""
    busiest = max(load.load_ms for load in placement.devices)
    most_ms = inf if request.bottleneck_ms is None else request.bottleneck_ms * (1 + ROUNDING)
    return max(0.0, busiest - most_ms)


def _valued(placement: Placement, request: PlacementRequest, solve: Solve) -> Placement:
    """Return the same layer map, evaluated with the request's profile.

    The request pins every layer and lifts the bottleneck, so that the solver only evaluates.
    """
    pinned = request.constraints.model_copy(update={"pinned": dict(placement.layer_devices)})
    changed = {
        "constraints": pinned,
        "explain": False,
        "bottleneck_ms": request.bottleneck_ms and LONGEST_MS,
    }
    valued: Placement | None
    if placement.replicas:
        # the solver gives pinned layers no replicas
        valued = predict_pipelines(request, placement)
    else:
        valued = solve(request.model_copy(update=changed))
    if valued is None or valued.objective_value is None:
        reason = "its replicas need other devices, links or memory"
        if valued is not None:
            reason = valued.infeasible.reason if valued.infeasible else "no answer in time"
        raise InfeasibleError(
            f"the placement that was measured does not answer the request: {reason}"
        )
    # Proofs and comparisons refer to another profile, so they are removed.
    kept = {
        "status": "feasible",
        "method": placement.method,
        "single_device": None,
        "speedup": None,
    }
    kept |= {"bound": None, "gap": None}
    return valued.model_copy(update=kept)


def _question(request: PlacementRequest, profile: Profile) -> PlacementRequest:
    return request.model_copy(update={"profile": profile})


def _settled(placement: Placement, following: Placement, measured: float, tolerance: float) -> bool:
    if not following.layer_devices or following.objective_value is None:
        return True
    return (
        _map(following) == _map(placement) or following.objective_value > (1 - tolerance) * measured
    )


def _map(placement: Placement) -> tuple[object, ...]:
    """Return what is to stay the same: the devices of each layer."""
    return *placement.layer_devices.items(), *sorted(placement.replicas.items())


def _at(times_ms: Mapping[str, float], kind: str) -> float:
    return times_ms.get(kind, 0.0)
