"""``Placement.device_map``: the answer in the form that accelerate and transformers take."""

from __future__ import annotations

import pytest
import torch
from model_list import CASES
from torch import nn

from placer import Placement, capture
from placer.errors import PlacementError


def _placed(**layers: str) -> Placement:
    return Placement(status="feasible", objective="throughput", layer_devices=layers)


def test_gpus_are_indices_and_the_host_is_cpu() -> None:
    placement = _placed(embed="cuda:1", body="cuda:0", head="cpu:3")
    assert placement.device_map() == {"embed": 1, "body": 0, "head": "cpu"}


def test_merged_layers_are_their_modules_and_a_later_call_follows_the_first() -> None:
    placement = _placed(**{"a+b.c": "cuda:1", "relu": "cuda:1", "relu@1": "cuda:0"})
    assert placement.device_map() == {"a": 1, "b.c": 1, "relu": 1}


def test_a_model_that_calls_no_module_is_one() -> None:
    assert _placed(**{"(model)": "cuda:2"}).device_map() == {"": 2}


def test_devices_of_one_host_go_by_their_own_names() -> None:
    assert _placed(a="node/cuda:0", b="node/cuda:1").device_map() == {"a": 0, "b": 1}


def test_what_has_no_device_map_is_told() -> None:
    with pytest.raises(PlacementError, match="several hosts, left, right"):
        _placed(a="left/cuda:0", b="right/cuda:0").device_map()
    with pytest.raises(PlacementError, match="it places no layer"):
        Placement(status="infeasible", objective="memory").device_map()


@pytest.mark.parametrize("model", ["resnet18", nn.Linear, 3])
def test_a_map_of_what_is_no_model_is_refused(model: object) -> None:
    with pytest.raises(
        PlacementError, match=r"device_map was given .*; give the nn.Module that was placed, or nothing"
    ):
        _placed(a="cuda:0").device_map(model)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration", "resnet18"])
@pytest.mark.parametrize("granularity", ["auto", "fine"])
def test_every_parameter_lies_in_a_module_of_the_map_as_accelerate_wants_it(name: str, granularity: str) -> None:
    model = CASES[name].make()
    args, kwargs = CASES[name].inputs(False)
    layers = capture(model.eval(), args, kwargs, granularity=granularity).layers
    found = _placed(**{layer.name: f"cuda:{index % 2}" for index, layer in enumerate(layers)}).device_map(model)
    for key in model.state_dict():
        assert any(key.startswith(f"{path}.") for path in found), key


class _Own(nn.Module):
    """A parameter of its own, and a weight under two names, one of which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.shared = nn.Linear(3, 3)
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.shared.weight


def test_what_no_layer_names_goes_where_its_tensor_is_or_to_the_first_device() -> None:
    found = _placed(first="cuda:1", last="cuda:0").device_map(_Own())
    assert found == {"first": 1, "last": 0, "scale": 1, "shared": 0}
