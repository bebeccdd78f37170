"""Requests whose placements a format can express."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from placer.errors import InputError
from placer.exports.format import Format
from placer.exports.formats import format_named
from placer.exports.units import Unit
from placer.schema.profile import Edge, Profile
from placer.schema.request import PlacementRequest


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
    rules = request.constraints
    if form.in_segments and rules.contiguous is False:
        raise InputError(
            f"constraints.contiguous is False, and {form.title} gives each device one contiguous "
            "segment; leave contiguous out, or for_format"
        )
    units = form.units([layer.name for layer in request.profile.layers])
    groups = tuple(unit.layers for unit in units if len(unit.layers) > 1)
    changed = {
        "colocated": (*rules.colocated, *groups),
        "contiguous": True if form.in_segments else rules.contiguous,
    }
    return request.model_copy(
        update={
            "for_format": None,
            "constraints": rules.model_copy(update=changed),
            "replicas": request.replicas if form.replicates else "never",
            "profile": _in_order(request.profile, form, units),
            "profiles": tuple(_in_order(each, form, units) for each in request.profiles),
        }
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
