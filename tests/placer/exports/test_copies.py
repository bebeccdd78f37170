"""Parameters of which several stages have a copy."""

from __future__ import annotations

from torch import nn

from placer.exports.copies import copied_parameters
from placer.exports.plan import Plan


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    model[1][0].weight = model[0].weight  # type: ignore[index]
    return model


def test_a_parameter_of_modules_on_several_devices_has_copies() -> None:
    plan = Plan({"0": "a", "1": "b", "2": "b"}, {}, model=tied())
    assert copied_parameters(plan) == [("0.weight", "1.0.weight")]


def test_a_parameter_of_a_module_that_runs_on_several_devices_has_copies() -> None:
    plan = Plan({"0": "a", "1.0": "a", "2": "a", "2@1": "b"}, {}, model=tied())
    assert copied_parameters(plan) == [("2.weight",), ("2.bias",)]


def test_parameters_on_one_device_have_none_and_without_the_model_none_are_known() -> None:
    assert copied_parameters(Plan({"0": "a", "1": "a", "2": "b"}, {}, model=tied())) == []
    assert copied_parameters(Plan({"0": "a", "1": "b"}, {})) == []
