"""Requests whose placements a format can express."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from placer.errors import InputError, PlacementError
from placer.exports.format import Format
from placer.exports.formats import format_named
from placer.exports.units import Unit
from placer.schema.base import Replicas
from placer.schema.placement import Infeasibility
from placer.schema.profile import Edge, Profile
from placer.schema.request import PlacementRequest, pins_apart


def expressible(request: PlacementRequest) -> PlacementRequest:
    """Return the request for the best placement that ``request.for_format`` can express.

    The layers of a unit share a device. If a device holds one segment of the execution order,
    stages are contiguous, and an empty value leads from each unit to the next one if no other value
    does: it keeps parallel branches in order, at the latency of one transfer where it is cut.

    Args:
        request: with the format, or without one: then it is returned itself.

    Raises:
        InputError: the request demands what the format cannot express.
    """
    if request.for_format is None:
        return request
    form = format_named(request.for_format)
    units = _units(request, form)
    request = form.restricted(request)
    rules = request.constraints
    contiguous = form.in_segments or form.contiguous
    if contiguous and rules.contiguous is False:
        raise InputError(
            f"constraints.contiguous is False, and {form.title} gives each device one contiguous "
            "segment; leave contiguous out, or for_format"
        )
    _refuse_pins_apart(request, form, units)
    groups = tuple(unit.layers for unit in units if len(unit.layers) > 1)
    changed = {
        "colocated": (*rules.colocated, *groups),
        "contiguous": contiguous or rules.contiguous,
    }
    return request.model_copy(
        update={
            "for_format": None,
            "constraints": rules.model_copy(update=changed),
            "replicas": _replicas(request, form),
            "profile": _in_order(request.profile, form, units),
            "profiles": tuple(_in_order(each, form, units) for each in request.profiles),
            "token_profile": None
            if request.token_profile is None
            else _in_order(request.token_profile, form, units),
        }
    )


def restricted_reason(request: PlacementRequest, reason: Infeasibility) -> Infeasibility:
    """Return the reason against a request with what its format requires in addition."""
    assert request.for_format is not None  # the caller restricted it
    form = format_named(request.for_format)
    also = (
        f"for_format={request.for_format!r} also requires that the layers of each block share a "
        f"device{', and that each device has one segment of the model' * form.in_segments}"
    )
    return reason.model_copy(update={"reason": f"{reason.reason}; {also}"})


def _units(request: PlacementRequest, form: Format) -> list[Unit]:
    """Return the units of the request's layers, with errors in terms of the request."""
    try:
        return form.units([layer.name for layer in request.profile.layers])
    except PlacementError as error:
        raise InputError(f"for_format is {form.name!r}: {error}") from error


def _refuse_pins_apart(request: PlacementRequest, form: Format, units: Sequence[Unit]) -> None:
    """Raise an InputError if layers of a unit are pinned to several devices."""
    pinned = request.constraints.pinned
    for unit in units if pinned else ():
        if pins := pins_apart(pinned, unit.layers):
            raise InputError(
                f"constraints.pinned pins {pins}, and {form.title} keeps "
                f"{unit} on one device; pin them alike, or leave out one "
                "of the pins, or for_format"
            )


def _in_order(profile: Profile, form: Format, units: Sequence[Unit]) -> Profile:
    """Return the profile with shared parameters untied and units in order, if the format does."""
    if form.copies_shared:
        profile = profile.untied()
    if not form.in_segments:
        return profile
    unit_of = {layer: index for index, unit in enumerate(units) for layer in unit.layers}
    fed = {
        (unit_of[edge.source], unit_of[target]) for edge in profile.edges for target in edge.targets
    }
    empty = tuple(
        Edge(source=before.layers[-1], targets=(after.layers[0],), bytes=0)
        for index, (before, after) in enumerate(pairwise(units))
        if (index, index + 1) not in fed
    )
    return profile.model_copy(update={"edges": (*profile.edges, *empty)}) if empty else profile


def _replicas(request: PlacementRequest, form: Format) -> Replicas:
    """Return which replicas the engine runs, of those that the request allows."""
    if not form.replicates:
        return "never"
    if request.replicas == "by-stage" and not form.replicates_by_stage:
        return "auto"
    return request.replicas
