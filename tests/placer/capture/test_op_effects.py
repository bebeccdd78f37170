"""Layers that draw random numbers: those that advance the device's generator when they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from placer.capture import capture_graph


class Calls(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x), self.training)


def _attention(chance: float) -> Any:
    def attend(x: Tensor, _: bool) -> Tensor:
        heads = x.reshape(x.shape[0], 2, 2, 2)
        return functional.scaled_dot_product_attention(
            heads, heads, heads, dropout_p=chance
        ).flatten(1)

    return attend


def _noisy_branch(x: Tensor, _: bool) -> Tensor:
    return torch.cond(x.sum() > 1e9, lambda x: x.clone(), lambda x: x + torch.rand_like(x), (x,))


CASES = {
    "dropout": lambda x, training: functional.dropout(x, 0.5, training),
    "dropout of nothing": lambda x, training: functional.dropout(x, 0.0, training),
    "dropout in place": lambda x, training: functional.dropout(x * 1, 0.5, training, inplace=True),
    "dropout of features": lambda x, training: functional.dropout1d(x[:, None], 0.5, training)[
        :, 0
    ],
    "alpha dropout": lambda x, training: functional.alpha_dropout(x, 0.5, training),
    "random slopes": lambda x, training: functional.rrelu(x, training=training),
    "attention": _attention(0.0),
    "attention with dropout": _attention(0.5),
    "noise": lambda x, _: x + torch.randn_like(x),
    "coins": lambda x, _: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "coins that never fall": lambda x, _: x * torch.empty_like(x).bernoulli_(0.0),
    "noise in a branch": _noisy_branch,
    "no chance": lambda x, _: torch.relu(x),
}


@pytest.mark.covering
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_random_if_it_moves_the_generator(name: str, training: bool) -> None:
    _is_told(Calls(CASES[name]).train(training), torch.randn(4, 8))


@pytest.mark.covering
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("chance", [0.0, 0.5])
def test_a_recurrent_layer_is_random_if_it_drops(chance: float, training: bool) -> None:
    _is_told(
        nn.LSTM(4, 4, num_layers=2, dropout=chance, batch_first=True).train(training),
        torch.randn(3, 2, 4),
    )


def _is_told(model: nn.Module, x: Tensor) -> None:
    graph = capture_graph(model, (x,))
    assert graph.captured, graph.not_captured_because
    before = torch.get_rng_state()
    model(x)
    moved = not torch.equal(before, torch.get_rng_state())
    assert any(layer.random for layer in graph.layers) == moved
