"""Footprints: equal for equal graphs, and different whenever a capture would differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from placer import zoo
from placer.capture.fingerprint import footprint

X = torch.randn(2, 8)


class Flexible(nn.Module):
    """Computes the given function."""

    scale = 2.0

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.relu, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 8)
        self.act = act

    def forward(self, x: Tensor) -> Any:
        return self.second(self.act(self.first(x))) * self.scale


def test_equal_models_have_equal_footprints_whatever_their_weights() -> None:
    assert (
        footprint(Flexible(), (X,), {})
        == footprint(Flexible(), (torch.zeros(2, 8),), {})
        is not None
    )


def _patched(model: Flexible) -> None:
    model.first.__dict__["forward"] = lambda x: nn.functional.linear(x, model.first.weight)


CHANGES: dict[str, Callable[[Flexible], Any]] = {
    "another operation in an attribute": lambda model: setattr(model, "act", torch.tanh),
    "another number in the code": lambda model: setattr(model, "scale", 3.0),
    "a frozen parameter": lambda model: model.first.weight.requires_grad_(False),
    "evaluation mode": lambda model: model.eval(),
    "another precision": lambda model: model.double(),
    "tied parameters": lambda model: setattr(model.second, "weight", model.first.weight),
    "a method that was replaced": _patched,
    "a checkpoint": lambda model: setattr(
        model, "act", lambda x: checkpoint(model.second, torch.relu(x), use_reentrant=False)
    ),
    "gradients off inside": lambda model: setattr(model, "act", torch.no_grad()(torch.relu)),
    "another module for the same work": lambda model: setattr(model, "act", nn.ReLU()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_graph_changes_the_footprint(change: str) -> None:
    class Fresh(Flexible):
        pass

    before = footprint(Fresh(), (X,), {})
    model = Fresh()
    CHANGES[change](model)
    after = footprint(model, (X.double() if change == "another precision" else X,), {})
    assert after is not None and after != before


def test_modules_of_other_names_have_another_footprint() -> None:
    layers = nn.Linear(8, 8), nn.ReLU()
    renamed = nn.Sequential()
    renamed.add_module("first", layers[0])
    renamed.add_module("second", layers[1])
    assert footprint(renamed, (X,), {}) != footprint(nn.Sequential(*layers), (X,), {})


def test_other_inputs_have_another_footprint() -> None:
    found = [
        footprint(Flexible(), (x,), {}) for x in (X, X.clone().requires_grad_(), torch.randn(3, 8))
    ]
    assert None not in found and len(set(found)) == 3


class Item(Flexible):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1.0 if x.sum().item() > 0 else 2.0)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Custom(Flexible):
    def forward(self, x: Tensor) -> Any:
        return Double.apply(super().forward(x))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", [Item, Custom])
def test_what_cannot_be_captured_has_none(kind: type[Flexible]) -> None:
    assert footprint(kind(), (X,), {}) is None


class Remembers(Flexible):
    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None
        self.all: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.last = super().forward(x)
        self.all.append(self.last)
        return self.last


def test_what_keeps_something_of_its_pass_has_none_and_nothing_of_it_stays() -> None:
    model = Remembers()
    assert footprint(model, (X,), {}) is None
    assert model.last is None and model.all == []


def test_the_model_is_left_as_it_was() -> None:
    model = zoo.resnet18()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert footprint(model, (torch.randn(2, 3, 32, 32),), {}) is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_of_a_compiled_model_it_cannot_be_told() -> None:
    assert footprint(torch.compile(Flexible()), (X,), {}) is None  # type: ignore[arg-type]
