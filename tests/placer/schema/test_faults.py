"""What a program, or a file, gives wrongly is told with the place, the value and the way out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import placer
from placer.errors import InputError
from placer.schema import Device, Layer, Link, PlacementRequest, Profile

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
        # pydantic's names of the branches of a union were in the place
        (
            placer.Constraints,
            {"recompute": "yes"},
            r"^Constraints.recompute: should be 'never', 'auto' or 'always', not 'yes' \(and 1 more\)$",
        ),
        (
            placer.Constraints,
            {"recompute": {"d": "sometimes"}},
            r"^Constraints.recompute.d: should be 'never', 'auto' or 'always', not 'sometimes'$",
        ),
        (PlacementRequest, {"profile": {"layers": LAYERS}}, "PlacementRequest: neither the request nor its profile"),
    ],
)
def test_a_program_is_told_the_place_the_value_and_the_nearest_name(make: Any, fields: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(**fields)


READ = [
    lambda kind, content: kind.model_validate(content),
    lambda kind, content: kind.model_validate_json(json.dumps(content)),
]


@pytest.mark.parametrize("read", READ)
def test_what_is_read_is_told_as_a_program_is_and_every_place_is_in_the_cause(read: Any) -> None:
    body = {"profile": PROFILE, "constraints": {"pined": {}}, "chunks": 0}
    with pytest.raises(InputError) as refused:
        read(PlacementRequest, body)
    assert str(refused.value) == (
        "PlacementRequest.constraints.pined: there is no such field; did you mean 'pinned'? (and 1 more)"
    )
    assert isinstance(refused.value.__cause__, ValidationError)
    assert {fault["loc"] for fault in refused.value.__cause__.errors()} == {("constraints", "pined"), ("chunks",)}


@pytest.mark.parametrize("read", READ)
def test_of_one_bad_layer_that_alone_is_told(read: Any) -> None:
    with pytest.raises(InputError, match=r"^Profile\.layers\.0\.name: is missing$"):
        read(Profile, {"layers": [{"forward_ms": {"t": 1.0}}]})


def test_what_is_no_json_or_no_dictionary_is_told_as_such() -> None:
    with pytest.raises(InputError, match=r"^Profile: should be JSON, not 'profile\.json': expected value at line 1"):
        Profile.model_validate_json("profile.json")
    with pytest.raises(InputError, match=r"^Profile: should be a valid dictionary .*, not 'profile\.json'$"):
        Profile.model_validate("profile.json")


def test_types_within_others_are_read_by_pydantic_with_their_places() -> None:
    class Body(BaseModel):
        request: PlacementRequest

    with pytest.raises(ValidationError) as refused:
        Body.model_validate({"request": {"profile": PROFILE, "chunks": 0}})
    assert [fault["loc"] for fault in refused.value.errors()] == [("request", "chunks")]


def test_of_several_faults_a_misspelt_name_is_told_before_the_missing_one_that_it_explains() -> None:
    with pytest.raises(InputError) as refused:
        Device.model_validate({"name": "d", "typ": "t", "memory_bytes": 9})
    assert str(refused.value) == "Device.typ: there is no such field; did you mean 'type'? (and 1 more)"


def test_of_a_long_name_or_value_the_middle_is_left_out() -> None:
    with pytest.raises(InputError) as refused:
        placer.Constraints(**{"x" * 10_000: "y" * 10_000})
    assert len(str(refused.value)) < 600
