"""Models that run through hooks are measured layer by layer, each many times."""

from __future__ import annotations

import pytest
import torch
from model_list import CASES
from torch import Tensor, nn

from placer import profile


class Cache:
    """What a layer has made so far; empty at first, so that it holds no tensor."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []


class Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.made.append(self.linear(x))
        if len(cache.made) > 1:
            raise ValueError("the cache is full")
        return cache.made[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fills, self.last = Fills(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.fills(x, Cache()))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_layer_finds_the_objects_that_it_is_given_as_they_were_each_time(training: bool) -> None:
    model = Model()
    model.fills.register_forward_hook(lambda *_: None)  # is not captured for this
    options = {
        "training": training,
        "granularity": "submodule",
        "repeats": 2,
        "cache": False,
        "progress": False,
    }
    measured = profile(model, torch.randn(3, 4), ["cpu:0"], **options)
    assert [layer.name for layer in measured.layers] == ["fills", "last"]


def test_a_language_model_with_a_cache_is_measured() -> None:
    # Every run of a layer wrote to the cache of the run before, whose gradients were gone.
    case = CASES["LlamaForCausalLM"]
    model = case.make()
    model.model.layers[0].register_forward_hook(lambda *_: None)
    _, kwargs = case.inputs(True)
    assert len(profile(model, kwargs, ["cpu:0"], repeats=1, cache=False, progress=False).layers) > 4
