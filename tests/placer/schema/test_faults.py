"""What a program, or a file, gives wrongly is told with the place, the value and the way out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

import placer
from placer.errors import InputError
from placer.schema import Device, Layer, Link, PlacementRequest, Profile
from placer.schema.faults import first_fault

LAYERS = [{"name": "a", "forward_ms": {"t": 1.0}}]
DEVICES = [{"name": "d", "type": "t", "memory_bytes": 9}]
PROFILE = {"layers": LAYERS, "cluster": {"devices": DEVICES}}


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (
            placer.Constraints,
            {"pined": {"a": "d"}},
            "Constraints.pined: there is no such field; did you mean 'pinned'?",
        ),
        (placer.Constraints, {"max_devices": "x"}, "Constraints.max_devices: should be a valid integer, not 'x'"),
        (placer.Constraints, {"max_devices": 0}, "Constraints.max_devices: should be greater .* equal to 1, not 0"),
        (Device, {"name": "d", "memory_bytes": 9}, "Device.type: is missing"),
        (Layer, {"name": "a", "forward_ms": {"t": float("nan")}}, "Layer.forward_ms.t: .* finite"),
        (Link, {"source": "a", "target": "a"}, "Link.bandwidth_bytes_per_s: is missing"),
        (Profile, PROFILE | {"clustr": None}, "Profile.clustr: there is no such field; did you mean 'cluster'?"),
        (
            Profile,
            {"layers": LAYERS, "cluster": {"device": DEVICES}},
            r"Profile.cluster.device: there is no such field; did you mean 'devices'\? \(and 1 more\)",
        ),
        (
            PlacementRequest,
            {"profile": PROFILE, "constraints": {"pinned": {"b": "d"}}},
            "PlacementRequest: constraints.pinned: there is no layer 'b'; there are 'a'$",
        ),
        (
            PlacementRequest,
            {"profile": PROFILE, "constraints": {"recompute": {"cuda:0": "always"}}},
            "PlacementRequest: constraints.recompute: there is no device 'cuda:0'; there are 'd'$",
        ),
        (PlacementRequest, {"profile": {"layers": LAYERS}}, "PlacementRequest: neither the request nor its profile"),
    ],
)
def test_a_program_is_told_the_place_the_value_and_the_nearest_name(make: Any, fields: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(**fields)


def test_what_is_read_raises_pydantics_own_error_with_every_place() -> None:
    body = {"profile": PROFILE, "constraints": {"pined": {}}, "chunks": 0}
    for read in (PlacementRequest.model_validate, lambda it: PlacementRequest.model_validate_json(json.dumps(it))):
        with pytest.raises(ValidationError) as refused:
            read(body)
        assert {fault["loc"] for fault in refused.value.errors()} == {("constraints", "pined"), ("chunks",)}


def test_of_several_faults_a_misspelt_name_is_told_before_the_missing_one_that_it_explains() -> None:
    with pytest.raises(ValidationError) as refused:
        Device.model_validate({"name": "d", "typ": "t", "memory_bytes": 9})
    told = first_fault(refused.value, Device)
    assert told == "Device.typ: there is no such field; did you mean 'type'? (and 1 more)"


def test_of_a_long_name_or_value_the_middle_is_left_out() -> None:
    with pytest.raises(InputError) as refused:
        placer.Constraints(**{"x" * 10_000: "y" * 10_000})
    assert len(str(refused.value)) < 600
