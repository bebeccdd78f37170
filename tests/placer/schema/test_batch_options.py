"""``BatchOptions`` in profiles, requests and placements: all but functions is carried, and other
rules are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from rows import row
from torch import nn
from torch.nn import functional

import placer
from placer import BatchOptions, DataFlow, PlacementRequest
from placer.errors import InputError
from placer.schema import Placement, Profile
from placer.testing import logical_devices

OPTIONS = [
    BatchOptions(inputs=1),
    BatchOptions(inputs={"images": "items", "table": None, "*": 2}, target="items"),
    BatchOptions(
        outputs={"loss": "sum", "hidden": 1, "seen": "list"}, reduction="sum", verify=False
    ),
    BatchOptions(target={"boxes": 0, "scale": None}, outputs="mean"),
]


def _with(request: PlacementRequest, options: BatchOptions) -> PlacementRequest:
    return request.model_copy(
        update={"profile": request.profile.model_copy(update={"batch_options": options})}
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_request_and_its_placement_carry_them_as_json(options: BatchOptions) -> None:
    request = _with(row([1.0, 2.0, 1.0], chunks=2), options)
    read = PlacementRequest.model_validate_json(request.model_dump_json())
    assert read == request and read.profile.batch_options == options
    placement = placer.solve(read)
    assert Placement.model_validate_json(placement.to_json()).batch_options == options
    assert request.content_hash() != _with(request, BatchOptions()).content_hash()


def test_functions_stay_behind() -> None:
    options = BatchOptions(
        weigh=lambda _, t: t, outputs={"a": lambda parts, _: parts, "b": "max"}, reduction="mean"
    )
    read = BatchOptions.model_validate_json(options.model_dump_json())
    assert read == BatchOptions(outputs={"b": "max"})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"inputs": -1}, "-1 is not a rule"),
        ({"inputs": {"x": "rows"}}, "'rows' for 'x' is not a rule"),
        ({"inputs": True}, "True is not a rule"),
        ({"target": {"y": "auto"}}, "'auto' for 'y' is not a rule"),
        ({"outputs": {"z": 64}}, "64 for 'z' is not a rule"),
        ({"outputs": None}, "None is not a rule"),
    ],
)
def test_what_is_no_rule_is_told_with_what_is_one(given: dict[str, Any], told: str) -> None:
    body = json.loads(row([1.0, 1.0]).model_dump_json())
    body["profile"]["batch_options"] = given
    with pytest.raises(ValueError, match=told.replace("(", r"\(")) as raised:
        PlacementRequest.model_validate(body)
    assert "a dimension (0, 1, ...)" in str(raised.value)


def test_from_a_profile_to_a_step_they_are_declared_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    # (length, batch, features)
    x, target = torch.randn(3, 8, 6).double(), torch.randint(5, (3, 8))

    def loss_fn(output: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, 1), goal.flatten(), reduction="sum")

    whole = loss_fn(model(x), target)
    whole.backward()  # type: ignore[no-untyped-call]
    expected = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]
    model.zero_grad()
    options = BatchOptions(inputs=1, target=1, reduction="sum")
    with logical_devices(2):
        profile = placer.profile(
            model,
            x[:, :2],
            ["cpu:0", "cpu:1"],
            batch_options=options,
            progress=False,
            cache=False,
            repeats=1,
        )
        assert profile.batch_size == 2
        read = Profile.model_validate_json(profile.model_dump_json())
        placement = placer.suggest(read, chunks=4, constraints=placer.Constraints(min_devices=2))
        flow = DataFlow(model)
        flow.update_flow(placement)
        assert flow.batch_options == options
        loss = flow.train_step(loss_fn)(x, target)
        torch.testing.assert_close(loss.cpu(), whole.detach())
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, check_device=False)
        with pytest.raises(InputError, match="leave batch_options out"):
            placer.suggest(read, batch_options=options)
