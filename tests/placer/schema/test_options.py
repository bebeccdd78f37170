"""Options objects: fields, defaults, and what a call combines."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

import pytest

import placer
from placer.errors import InputError
from placer.estimator.estimate import estimate
from placer.schema import (
    Constraints,
    EstimateOptions,
    Placement,
    PlacementRequest,
    Profile,
    ProfileOptions,
    RefineOptions,
    SolveOptions,
    SuggestOptions,
)
from placer.schema.options import combined

MOST_PARAMETERS = 10


def profile(*, training: bool = True, batch_size: int = 1) -> Profile:
    return Profile.model_validate(
        {
            "layers": [{"name": "a", "forward_ms": {"t": 1.0}, "backward_ms": {"t": 1.0}}],
            "cluster": {"devices": [{"name": "t:0", "type": "t", "memory_bytes": 9}]},
            "training": training,
            "batch_size": batch_size,
        }
    )


@pytest.mark.parametrize(
    "kind", [Constraints, SolveOptions, ProfileOptions, SuggestOptions, RefineOptions]
)
def test_every_field_says_what_it_means(kind: Any) -> None:
    for name, field in kind.model_fields.items():
        assert field.description, name
        assert len(field.description.split("\n\n")[0]) <= 90, name


@pytest.mark.parametrize("name", ["suggest", "profile", "solve", "refine"])
def test_a_public_function_has_at_most_ten_parameters(name: str) -> None:
    given = inspect.signature(getattr(placer, name)).parameters.values()
    assert sum(one.kind is not one.VAR_KEYWORD for one in given) <= MOST_PARAMETERS


def test_single_fields_add_to_an_options_object_of_a_base_class() -> None:
    asked = combined(
        SuggestOptions, SolveOptions(chunks=4), {"granularity": "fine"}, placer.suggest
    )
    assert (asked.chunks, asked.granularity, asked.objective) == (4, "fine", "throughput")


@pytest.mark.parametrize(
    ("options", "fields", "message"),
    [
        (SolveOptions(chunks=4), {"chunks": 4}, "chunks is given as an argument and in options"),
        (None, {"granularty": "fine"}, "did you mean 'granularity'"),
        (None, {"chunks": 0}, "SuggestOptions.chunks: should be greater than or equal to 1, not 0"),
        ({"chunks": 4}, {}, r"options is a dict; give placer.SuggestOptions\(\.\.\.\)"),
        (RefineOptions(), {}, r"options is a RefineOptions; give placer.SuggestOptions"),
    ],
)
def test_options_that_cannot_be_used_are_named(options: Any, fields: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        combined(SuggestOptions, options, fields, placer.suggest)


def test_an_argument_of_suggest_may_not_be_given_in_options_too() -> None:
    for given in ({"objective": "memory"}, {"training": True}, {"batch_size": 4}):
        (name,) = given
        with pytest.raises(InputError, match=f"{name} is given as an argument and in options"):
            placer.suggest(profile(), options=SolveOptions(**given), **given)


def test_a_profile_is_placed_by_an_options_object() -> None:
    placement = placer.suggest(profile(), options=SolveOptions(objective="memory", chunks=2))
    assert (placement.objective, placement.chunks) == ("memory", 2)


@pytest.mark.parametrize(
    ("options", "training", "expected"),
    [
        (SolveOptions(), True, ("1f1b", "isolated")),
        (SolveOptions(objective="step"), True, ("auto", "steady-state")),
        (SolveOptions(objective="step"), False, ("auto", "isolated")),
        (SolveOptions(objective="step", training=False), True, ("auto", "isolated")),
        (
            SolveOptions(objective="step", step_kind="isolated", schedule="1f1b"),
            True,
            ("1f1b", "isolated"),
        ),
    ],
)
def test_the_schedule_and_the_steps_depend_on_the_objective(
    options: SolveOptions, training: bool, expected: tuple[str, str]
) -> None:
    request = PlacementRequest.from_options(options, [profile(training=training)])
    assert (request.schedule, request.step_kind) == expected


def test_the_last_profile_is_the_requests_own() -> None:
    small, large = profile(), profile(batch_size=2)
    request = PlacementRequest.from_options(SolveOptions(objective="step"), [small, large])
    assert (request.profile, request.profiles) == (large, (small,))


def test_equal_requests_keep_their_identifier_when_fields_move_to_a_base_class() -> None:
    """The identifier hashes the fields in order, so databases of an earlier version stay valid."""
    names = list(PlacementRequest.model_fields)
    assert names[:8] == [
        "schema_version",
        "profile",
        "profiles",
        "cluster",
        "token_profile",
        "objective",
        "constraints",
        "training",
    ]
    assert names[8:] == [name for name in SolveOptions.model_fields if name not in names[:8]]


@pytest.mark.parametrize(
    ("asked", "because"),
    [
        ({"objective": "latency", "training": False}, "the objective is 'latency'"),
        ({"objective": "memory"}, "the objective is 'memory'"),
        ({"objective": "devices", "bottleneck_ms": 9.0}, "the objective is 'devices'"),
        ({"objective": "step", "training": False}, "the request places inference"),
    ],
)
def test_replicas_are_refused_where_no_search_considers_them(
    asked: dict[str, Any], because: str
) -> None:
    with pytest.raises(InputError) as refused:
        PlacementRequest(profile=profile(), replicas="auto", **asked)
    assert (
        "replicas is 'auto', which only training under objectives 'step' and 'throughput' uses; "
        f"{because}: leave replicas out"
    ) in str(refused.value)


def test_a_request_is_made_from_options_and_a_list_of_profiles_alone() -> None:
    # They were an AttributeError of 'int' and a TypeError of 'Profile'.
    one: Any = profile()
    wrong: Any = 3
    with pytest.raises(InputError, match=r"options is an int; give placer\.SolveOptions"):
        PlacementRequest.from_options(wrong, [one])
    with pytest.raises(
        InputError, match=r"profiles is a Profile; give a list, such as \[profile\]"
    ):
        PlacementRequest.from_options(SolveOptions(), one)


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        (SolveOptions(objective="step"), True),
        (SolveOptions(objective="step", chunks=1), False),
        (SolveOptions(objective="step", batch_size=4), False),
        (SolveOptions(), False),
    ],
)
def test_a_step_without_a_batch_is_warned_of(options: SolveOptions, warns: bool) -> None:
    request = PlacementRequest.from_options(options, [profile(batch_size=2)])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        request.warn_of_one_size(options)
    assert ["a batch of 2 samples" in str(one.message) for one in warned] == [True] * warns


@pytest.mark.parametrize(
    ("objective", "devices", "warns"),
    [("throughput", "ab", True), ("latency", "ab", False), ("throughput", "a", False)],
)
def test_a_pipeline_of_a_model_that_runs_through_hooks_is_warned_of(
    objective: Any, devices: str, warns: bool
) -> None:
    because = {"captured": False, "not_captured_because": "it branches on a value"}
    hooked = profile(batch_size=2).model_copy(update=because)
    where = {f"layer {name}": name for name in devices}
    placement = Placement(status="feasible", objective=objective, layer_devices=where)
    request = PlacementRequest(profile=hooked, objective=objective)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        request.warn_of_hooks(placement.layer_devices)
    assert ["it branches on a value" in str(one.message) for one in warned] == [True] * warns


def test_an_unknown_argument_is_answered_with_each_name_once() -> None:
    # 'training' is an argument of estimate and a field of its options, and came twice.
    with pytest.raises(InputError) as refused:
        combined(EstimateOptions, None, {"zzz": 5}, estimate)
    names = re.findall("'([a-z_]+)'", str(refused.value))
    assert "training" in names and len(names) == len(set(names))
