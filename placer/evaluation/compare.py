"""Comparison of several maps, evaluated for one request."""

from __future__ import annotations

from collections.abc import Mapping

from placer.errors import InputError
from placer.evaluation.evaluate import evaluated
from placer.schema import Comparison, LayerMap, Move, Placement, PlacementRequest
from placer.schema.placement import holders
from placer.utils.units import count_text

# Largest number of layers of a comparison that are listed; further ones are counted.
MAX_MOVES = 1000


def compare(
    request: PlacementRequest,
    maps: Mapping[str, LayerMap],
    placements: Mapping[str, Placement] | None = None,
) -> Comparison:
    """Evaluate maps for one request, and list where they differ.

    Args:
        request: The request.
        maps: The maps, by name.
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
    evaluations = [
        evaluated(request, given, chosen_by=of.get(name)) for name, given in maps.items()
    ]
    values = [
        (one.objective_value, name)
        for name, one in zip(maps, evaluations, strict=True)
        if one.valid and one.objective_value is not None
    ]
    held_by = [holders(given.layer_devices, given.replicas) for given in maps.values()]
    every = [*dict.fromkeys(layer.name for layer in request.profile.layers)]
    rows = [
        Move(layer=layer, devices=tuple(held.get(layer) for held in held_by)) for layer in every
    ]
    moves = [row for row in rows if len(set(row.devices)) > 1]
    return Comparison(
        names=tuple(maps),
        evaluations=tuple(evaluations),
        best=min(values)[1] if values else None,
        moves=tuple(moves[:MAX_MOVES]),
        moved_layers=len(moves),
    )
