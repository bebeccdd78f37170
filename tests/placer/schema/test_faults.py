"""What a program, or a file, gives wrongly is told with the place, the value and the way out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import placer
from placer.errors import InputError
from placer.report.timeline import Measurement
from placer.schema import Device, Layer, Link, PlacementRequest, Profile
from placer.schema.base import read_json
from placer.schema.faults import FieldFault, field_faults

LAYERS = [{"name": "a", "forward_ms": {"t": 1.0}}]
DEVICES = [{"name": "d", "type": "t", "memory_bytes": 9}]
PROFILE = {"layers": LAYERS, "cluster": {"devices": DEVICES}}
STAND_INS = [{"name": f"cpu:{index}", "type": "t", "memory_bytes": 9} for index in range(2)]
LINKS = [
    {"source": a, "target": b, "bandwidth_bytes_per_s": 1e9, "latency_s": 0.0}
    for a, b in (("cpu:0", "cpu:1"), ("cpu:1", "cpu:0"))
]
PROFILE_OF_STAND_INS = {"layers": LAYERS, "cluster": {"devices": STAND_INS, "links": LINKS}}


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (
            placer.Constraints,
            {"pined": {"a": "d"}},
            "Constraints.pined: there is no such field; did you mean 'pinned'?",
        ),
        (
            placer.Constraints,
            {"max_devices": "x"},
            "Constraints.max_devices: should be a valid integer, not 'x'",
        ),
        (
            placer.Constraints,
            {"max_devices": 0},
            "Constraints.max_devices: should be greater .* equal to 1, not 0",
        ),
        (Device, {"name": "d", "memory_bytes": 9}, "Device.type: is missing"),
        (Layer, {"name": "a", "forward_ms": {"t": float("nan")}}, "Layer.forward_ms.t: .* finite"),
        (Link, {"source": "a", "target": "a"}, "Link.bandwidth_bytes_per_s: is missing"),
        (
            Profile,
            PROFILE | {"clustr": None},
            "Profile.clustr: there is no such field; did you mean 'cluster'?",
        ),
        (
            Profile,
            {"layers": LAYERS, "cluster": {"device": DEVICES}},
            r"Profile.cluster.device: there is no such field; "
            r"did you mean 'devices'\? \(and 1 more\)",
        ),
        (
            PlacementRequest,
            {"profile": PROFILE, "constraints": {"pinned": {"b": "d"}}},
            "PlacementRequest: constraints.pinned: there is no layer 'b'; there is only 'a'$",
        ),
        (
            PlacementRequest,
            {"profile": PROFILE, "constraints": {"recompute": {"cuda:0": "always"}}},
            "PlacementRequest: constraints.recompute: there is no device 'cuda:0'; "
            "there is only 'd'$",
        ),
        # a device of another kind was suggested
        (
            PlacementRequest,
            {"profile": PROFILE_OF_STAND_INS, "constraints": {"pinned": {"a": "cuda:7"}}},
            "PlacementRequest: constraints.pinned: there is no device 'cuda:7'; "
            "there are 'cpu:0', 'cpu:1'$",
        ),
        # pydantic's names of the branches of a union were in the place
        (
            placer.Constraints,
            {"recompute": "yes"},
            r"^Constraints.recompute: should be 'never', 'auto' or 'always', not 'yes' "
            r"\(and 1 more\)$",
        ),
        (
            placer.Constraints,
            {"recompute": {"d": "sometimes"}},
            r"^Constraints.recompute.d: should be 'never', 'auto' or 'always', not 'sometimes'$",
        ),
        (
            PlacementRequest,
            {"profile": {"layers": LAYERS}},
            "PlacementRequest: neither the request nor its profile",
        ),
    ],
)
def test_a_program_is_told_the_place_the_value_and_the_nearest_name(
    make: Any, fields: Any, message: str
) -> None:
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
        "PlacementRequest.constraints.pined: there is no such field; "
        "did you mean 'pinned'? (and 1 more)"
    )
    assert isinstance(refused.value.__cause__, ValidationError)
    assert {fault["loc"] for fault in refused.value.__cause__.errors()} == {
        ("constraints", "pined"),
        ("chunks",),
    }


@pytest.mark.parametrize("read", READ)
def test_of_one_bad_layer_that_alone_is_told(read: Any) -> None:
    with pytest.raises(InputError, match=r"^Profile\.layers\.0\.name: is missing$"):
        read(Profile, {"layers": [{"forward_ms": {"t": 1.0}}]})


LABELS = (
    "constrained-",
    "constrained-str",
    "function-",
    "function-after[in_order(), dict[constrained-str,literal['never','auto','always']]]",
    "literal[",
    "literal['never','auto','always']",
    "dict[constrained-str,str]",
    "nullable[int]",
    "[key]",
    "int",
    "str",
    "0",
    "schema_versio",
    "a/b",
    "",
)
"""What pydantic calls branches of unions and keys, or could."""


def replaced(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The content with a value put at a path."""
    if not path:
        return value
    first, *rest = path
    if isinstance(content, list):
        return [
            replaced(one, tuple(rest), value) if number == first else one
            for number, one in enumerate(content)
        ]
    return {**content, first: replaced(content.get(first, {}), tuple(rest), value)}


WHOLE = {"profile": PROFILE, "cluster": {"devices": DEVICES}, "constraints": {}}
OBJECTS = [
    (),
    ("profile",),
    ("profile", "layers", 0),
    ("profile", "cluster"),
    ("cluster", "devices", 0),
    ("constraints",),
]
DICTIONARIES = [
    (("constraints", "pinned"), 3),
    (("constraints", "forbidden"), "d"),
    (("constraints", "recompute"), "sometimes"),
    (("profile", "layers", 0, "forward_ms"), -1.0),
    (("profile", "layers", 0, "backward_ms"), "soon"),
]


@pytest.mark.covering
@pytest.mark.parametrize("name", LABELS)
@pytest.mark.parametrize("where", OBJECTS, ids=str)
def test_an_unknown_field_is_named_whatever_it_is_called(name: str, where: tuple[Any, ...]) -> None:
    # One that began like a branch of a union was an IndexError, and 500 of the service.
    content = replaced(WHOLE, (*where, name), None)
    with pytest.raises(ValidationError) as refused:
        read_json(PlacementRequest, json.dumps(content))
    (first, *_), _ = field_faults(refused.value, PlacementRequest, 9)
    assert first.place == (*where, name) and first.text.startswith("there is no such field")
    with pytest.raises(InputError, match="there is no such field"):
        PlacementRequest.model_validate(content)


@pytest.mark.covering
@pytest.mark.parametrize("name", [name for name in LABELS if name])
@pytest.mark.parametrize(("where", "value"), DICTIONARIES, ids=str)
def test_a_wrong_value_of_a_dictionary_is_named_whatever_its_key_is(
    name: str, where: tuple[Any, ...], value: Any
) -> None:
    content = replaced(WHOLE, (*where, name), value)
    with pytest.raises(ValidationError) as refused:
        read_json(PlacementRequest, json.dumps(content))
    (first, *rest), _ = field_faults(refused.value, PlacementRequest, 9)
    assert first.place == (*where, name) and first.text.startswith("should be")
    assert {fault.place for fault in rest} <= {where}


@pytest.mark.parametrize(("where", "value"), DICTIONARIES, ids=str)
def test_a_key_that_is_no_name_is_told_as_such(where: tuple[Any, ...], value: Any) -> None:
    good = {"pinned": "d", "forbidden": ["d"], "recompute": "never"}.get(where[-1], 1.0)
    with pytest.raises(ValidationError) as refused:
        read_json(PlacementRequest, json.dumps(replaced(WHOLE, (*where, ""), good)))
    faults, _ = field_faults(refused.value, PlacementRequest, 9)
    assert FieldFault((*where, ""), "its name should have at least 1 character, not ''") in faults


@pytest.mark.parametrize("value", [[1], {}, None])
def test_a_value_that_no_branch_of_a_union_takes_is_told_without_the_branches(value: Any) -> None:
    # The place was Profile.granularity.int.
    with pytest.raises(InputError, match=r"^Profile\.granularity: should be a valid integer"):
        Profile.model_validate({**PROFILE, "granularity": value})


def test_a_measurement_is_told_by_its_rows() -> None:
    text = json.dumps(
        {"title": "t", "devices": [], "measured": [["cuda:0", "forward", 0, None, "x", 0.0, 1.0]]}
    )
    with pytest.raises(
        InputError, match=r"^Measurement\.measured\.0\.(4|micro_batch): should be a valid integer"
    ):
        Measurement.from_json(text)


def test_what_is_no_json_or_no_dictionary_is_told_as_such() -> None:
    with pytest.raises(
        InputError, match=r"^Profile: should be JSON, not 'profile\.json': expected value at line 1"
    ):
        Profile.model_validate_json("profile.json")
    with pytest.raises(
        InputError, match=r"^Profile: should be a valid dictionary .*, not 'profile\.json'$"
    ):
        Profile.model_validate("profile.json")


def test_types_within_others_are_read_by_pydantic_with_their_places() -> None:
    class Body(BaseModel):
        request: PlacementRequest

    with pytest.raises(ValidationError) as refused:
        Body.model_validate({"request": {"profile": PROFILE, "chunks": 0}})
    assert [fault["loc"] for fault in refused.value.errors()] == [("request", "chunks")]


def test_of_several_faults_a_misspelt_name_is_told_before_the_missing_one_that_it_explains() -> (
    None
):
    with pytest.raises(InputError) as refused:
        Device.model_validate({"name": "d", "typ": "t", "memory_bytes": 9})
    assert (
        str(refused.value)
        == "Device.typ: there is no such field; did you mean 'type'? (and 1 more)"
    )


def test_of_a_long_name_or_value_the_middle_is_left_out() -> None:
    with pytest.raises(InputError) as refused:
        placer.Constraints(**{"x" * 10_000: "y" * 10_000})
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(("name", "text"), [(1, "a valid string, not 1"), ("", "at least 1 char")])
def test_a_key_of_a_dictionary_of_objects_is_not_taken_for_a_field(name: Any, text: str) -> None:
    # It was 'JointRequest.models.1.[key]: should be a valid string, not 1'.
    with pytest.raises(
        InputError, match=rf"^JointRequest\.models\.{name}: its name should .*{text}"
    ):
        placer.JointRequest(models={name: {"profile": PROFILE}})


def test_an_empty_dictionary_is_described_as_a_list_is() -> None:
    with pytest.raises(
        InputError, match=r"^JointRequest\.models: should have at least 1 item, not 0"
    ):
        placer.JointRequest(models={})


@pytest.mark.parametrize("given", [5, None, {"layers": []}])
def test_json_that_is_no_text_is_an_input_error(given: Any) -> None:
    # It was a TypeError: argument of type 'int' is not iterable.
    with pytest.raises(InputError, match=r"^Profile: JSON input should be string, bytes"):
        Profile.model_validate_json(given)
