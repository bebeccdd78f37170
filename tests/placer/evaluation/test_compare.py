"""Comparison of several maps."""

from __future__ import annotations

import pytest
from evaluated_maps import EVEN, example

from placer.errors import InputError
from placer.evaluation.compare import compare
from placer.schema import Placement, Replica
from placer_server.openapi import examples


def test_placements_with_replicas_are_no_maps_to_compare():
    request = example()
    first = request.devices[0].name
    where = {layer.name: first for layer in request.profile.layers}
    shared = tuple(Replica(device=device.name, samples=4) for device in request.devices[:2])
    placement = Placement(
        status="feasible",
        objective="throughput",
        layer_devices=where,
        replicas={first: shared},
        batch_size=8,
    )
    with pytest.raises(InputError, match="placement p has replicas"):
        compare(request, {"p": where, "mine": where}, {"p": placement})


def test_maps_side_by_side_name_the_best_and_the_layers_that_differ():
    found = compare(example(), {"even": EVEN, "uneven": examples.own_map()})
    assert found.best == "even"
    assert [(move.layer, move.devices) for move in found.moves] == [
        ("block.1", ("cuda:1", "cuda:0"))
    ]
