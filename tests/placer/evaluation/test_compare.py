"""Comparison of several maps."""

from __future__ import annotations

from evaluated_maps import EVEN, example

from placer.evaluation.compare import compare
from placer.schema import LayerMap, Replica
from placer_server.openapi import examples


def test_maps_side_by_side_name_the_best_and_the_layers_that_differ():
    found = compare(
        example(),
        {
            "even": LayerMap(layer_devices=EVEN),
            "uneven": LayerMap(layer_devices=examples.own_map()),
        },
    )
    assert found.best == "even"
    assert [(move.layer, move.devices) for move in found.moves] == [
        ("block.1", ("cuda:1", "cuda:0"))
    ]


def test_replicas_are_compared_with_one_device_and_with_stages():
    request = example(objective="step", chunks=4)
    first, second = (device.name for device in request.devices)
    where = {layer.name: first for layer in request.profile.layers}
    half = request.profile.batch_size
    shared = tuple(Replica(device=name, samples=half) for name in (first, second))
    copies = LayerMap(layer_devices=where, replicas={first: shared})
    found = compare(request, {"one": LayerMap(layer_devices=where), "both": copies})
    assert [one.valid for one in found.evaluations] == [True, True]
    assert found.best == "both"
    assert found.moved_layers == len(where)
    assert {move.devices for move in found.moves} == {(first, f"{first}, {second}")}
