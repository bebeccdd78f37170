"""Listed models train as unsplit under a random map, interleaved or recomputed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model_list import CASES, converted
from splitting import scatter_layers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from placer import DataFlow
from placer.executor.training.training_pipeline import Order
from placer.testing import logical_devices

CHUNKS = 2


def _loss(output: Any, target: Tensor) -> Tensor:
    """A mean over samples of everything that the model returns."""
    found = [
        leaf
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    return torch.stack([leaf.cos().mean() for leaf in found]).sum()


def _without_chance(model: nn.Module) -> nn.Module:
    """No dropout: split and unsplit models draw in another order."""
    for module in model.modules():
        for name in ("p", "dropout", "dropout_rate", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.double().train()


def _twice(value: Any) -> Any:
    return torch.cat([value, value.flip(0)]) if isinstance(value, Tensor) and value.dim() else value


@pytest.mark.covering
@pytest.mark.parametrize(
    ("schedule", "recompute"), [("interleaved", []), ("zero-bubble", [0, 1, 2])]
)
@pytest.mark.parametrize("name", ["lstm_time_first", "skips", "MixtralForCausalLM"])
def test_a_step_under_a_random_map_equals_the_unsplit_models(
    name: str, schedule: Order, recompute: list[Any]
) -> None:
    torch.manual_seed(0)
    model = _without_chance(CASES[name].make())
    whole = copy.deepcopy(model)
    args, kwargs = tree_map(_twice, converted(CASES[name].inputs(True), torch.float64))
    size = next(
        len(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()
    )
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 3, seed=1)
        flow.recompute = recompute
        step = flow.train_step(_loss, schedule=schedule)
        loss = step(kwargs or args, torch.zeros(size), chunks=CHUNKS).cpu()
        assert flow.not_captured_because == ""
    expected = torch.zeros((), dtype=torch.float64)
    for index in range(CHUNKS):
        part_args, part_kwargs = tree_map(
            lambda value, index=index: (
                value.chunk(CHUNKS)[index] if isinstance(value, Tensor) and value.dim() else value
            ),
            (args, kwargs),
        )
        part_loss = _loss(whole(*part_args, **part_kwargs), torch.zeros(())) / CHUNKS
        part_loss.backward()
        expected += part_loss.detach()
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=1e-10)
    for (path, mine), its in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (mine.grad is None) == (its.grad is None), path
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad.cpu(), its.grad, atol=1e-10, rtol=1e-10, msg=path)
