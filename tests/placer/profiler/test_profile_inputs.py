from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from placer.capture.input_forms import call_arguments
from placer.errors import InputError
from placer.profiler.profile_inputs import mode

Pair = namedtuple("Pair", "a b")
X = torch.zeros(1)


@pytest.mark.parametrize(
    ("given", "args", "kwargs"),
    [
        (X, (X,), {}),
        ((X, 3), (X, 3), {}),
        ({"x": X}, (), {"x": X}),
        ([X, X], ([X, X],), {}),
        (({"x": X},), ({"x": X},), {}),
        (Pair(X, X), (Pair(X, X),), {}),
    ],
)
def test_inputs_become_arguments(given: Any, args: Any, kwargs: Any) -> None:
    assert call_arguments(given, "example_inputs") == (args, kwargs)


def test_none_is_no_input() -> None:
    with pytest.raises(InputError, match="give a tensor, a tuple"):
        call_arguments(None, "example_inputs")


def test_a_dict_that_is_an_argument_must_be_in_a_tuple() -> None:
    with pytest.raises(InputError, match=r"the key 3, which is not a string; .*\(inputs,\)"):
        call_arguments({3: X}, "example_inputs")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("was", [True, False])
def test_the_mode_is_set_and_given_back(training: bool, was: bool) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout()).train(was)
    with mode(model, training):
        assert [module.training for module in model.modules()] == [training] * 3
    assert [module.training for module in model.modules()] == [was] * 3


def test_frozen_parts_of_a_model_in_training_stay_in_evaluation() -> None:
    model = nn.Sequential(nn.BatchNorm1d(1).eval(), nn.Dropout())
    with mode(model, training=True):
        assert [module.training for module in model.modules()] == [True, False, True]
    with mode(model, training=False):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, False, True]


def test_the_mode_is_given_back_after_an_error() -> None:
    model = nn.Dropout()
    with pytest.raises(KeyError), mode(model, training=False):
        raise KeyError
    assert model.training
