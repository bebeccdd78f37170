"""Faults of maps, named with their values."""

from __future__ import annotations

import pytest
from evaluated_maps import EVEN, example

from placer.evaluation.evaluate import evaluated
from placer.schema import LayerMap

FAULTS = {
    "layer-missing": ({}, lambda m: m.pop("head"), "'head' has no device"),
    "layer-unknown": ({}, lambda m: m.update(tail="cuda:0"), "no such layer"),
    "device-unknown": ({}, lambda m: m.update(head="cuda:7"), "'cuda:7' is not a device"),
    "pin-broken": (
        {"constraints": {"pinned": {"head": "cuda:0"}}},
        lambda m: None,
        "pinned to 'cuda:0'",
    ),
    "device-forbidden": (
        {"constraints": {"forbidden": {"*": ["cuda:1"]}}},
        lambda m: None,
        "must not be on",
    ),
    "colocation-broken": (
        {"constraints": {"colocated": [["embed", "head"]]}},
        lambda m: None,
        "share a device",
    ),
    "too-many-devices": (
        {"constraints": {"max_devices": 1}},
        lambda m: None,
        "it uses 2 devices; max_devices is 1",
    ),
    "too-few-devices": (
        {"constraints": {"min_devices": 2}},
        lambda m: m.update(dict.fromkeys(m, "cuda:0")),
        "it uses 1 device; min_devices is 2",
    ),
    "too-many-layers": (
        {"constraints": {"max_layers": 1}},
        lambda m: None,
        "layers; max_layers is 1",
    ),
    "not-contiguous": (
        {},
        lambda m: m.update(head="cuda:0"),
        "form a cycle between 'cuda:0', 'cuda:1'",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_a_map_is_named(kind):
    changes, spoil, words = FAULTS[kind]
    where = dict(EVEN)
    spoil(where)
    found = evaluated(example(**changes), LayerMap(layer_devices=where))
    assert (found.valid, found.faults[0].kind) == (False, kind)
    assert words in found.faults[0].detail


def test_a_map_that_does_not_fit_says_how_many_bytes_are_short():
    # 0.5 + 1 GiB of weights, as much of gradients, twice as much for Adam: 6 GiB on each of two
    # devices of 2 GiB. A value that is kept, one that is sent, and its gradient take 16 MiB each.
    found = evaluated(example("infeasible"), LayerMap(layer_devices=EVEN))
    assert [fault.kind for fault in found.faults] == ["out-of-memory"] * 2
    assert found.faults[0].missing_bytes == 4 * 2**30 + 3 * 2**24


def test_a_map_over_a_missing_link_is_named_and_has_no_value():
    back = {"source": "cuda:1", "target": "cuda:0", "bandwidth_bytes_per_s": 1e9}
    request = example(
        cluster={"devices": [device.model_dump() for device in example().devices], "links": [back]}
    )
    found = evaluated(request, LayerMap(layer_devices=EVEN))
    assert {fault.kind for fault in found.faults} == {"link-missing"}
    assert found.objective_value is None
