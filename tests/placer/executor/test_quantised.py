"""Layers that torchao and bitsandbytes quantise, placed: all of a weight moves, and results are the
unsplit model's."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from model_list import torchvision_models
from placed_weights import (
    CLOSE,
    Adapted,
    assert_adapters_train_as_unsplit,
    assert_moves_and_comes_back,
)
from placed_weights import assert_runs_as_unsplit as assert_runs
from quantised_kinds import QUANTISED
from torch import nn
from weight_kinds import batch_of, model_of

import placer
from placer import DataFlow, devices
from placer.profiler.profile import profile
from placer.testing import logical_devices

pytestmark = pytest.mark.skipif(
    None in map(find_spec, ("torchao", "bitsandbytes")), reason="needs torchao and bitsandbytes"
)

NOT_PACKED = [name for name in QUANTISED if "packed" not in name]
"""What bitsandbytes has packed for calls in evaluation mode it cannot train through."""


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("kind", QUANTISED)
def test_all_that_a_layer_stores_moves_with_it_and_comes_back(kind: str) -> None:
    assert_moves_and_comes_back(QUANTISED[kind])


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("kind", QUANTISED)
def test_a_placed_model_gives_what_the_unsplit_model_gives(kind: str) -> None:
    assert_runs(QUANTISED[kind])


@pytest.mark.parametrize("kind", QUANTISED)
def test_bytes_are_those_that_are_stored_and_the_model_stays_as_it_was(kind: str) -> None:
    model, x = model_of(QUANTISED[kind]), batch_of(QUANTISED[kind])
    found = profile(model, x, ["cpu:0"], training=False, cache=False, progress=False, repeats=1)
    for layer, module in zip(
        (found.layers[0], found.layers[-1]), (model[0], model[2]), strict=True
    ):
        stored = {
            tensor.data_ptr(): tensor.numel() * tensor.itemsize
            for tensor in QUANTISED[kind].stored(module)
        }
        assert layer.param_bytes + layer.buffer_bytes == sum(stored.values())
    with torch.no_grad():
        assert torch.equal(model(x), model_of(QUANTISED[kind])(x))


def test_a_weight_that_the_first_call_packs_is_not_packed_by_a_look() -> None:
    """A state that says that the weight is packed, beside one that is not, gives other results."""
    import bitsandbytes

    def made() -> Any:
        torch.manual_seed(0)
        layers = [
            bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4")
            for _ in range(2)
        ]
        return nn.Sequential(*layers).to("cpu").eval().requires_grad_(False)

    model, x = made(), batch_of(QUANTISED["bitsandbytes nf4"])
    before = [(layer.weight.data.clone(), {**vars(layer.weight.quant_state)}) for layer in model]
    profile(model, x, ["cpu:0"], training=False, cache=False, progress=False, repeats=1)
    for layer, (data, state) in zip(model, before, strict=True):
        assert torch.equal(layer.weight.data, data)
        assert vars(layer.weight.quant_state) == state
    with torch.no_grad():
        torch.testing.assert_close(model(x), made()(x))


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("kind", NOT_PACKED)
def test_adapters_over_a_quantised_layer_train_as_in_the_unsplit_model(kind: str) -> None:
    assert_adapters_train_as_unsplit(QUANTISED[kind], "1f1b")


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(
    "kind", ["torchao int8 weights", "torchao float8 weights", "bitsandbytes nf4"]
)
def test_a_quantised_model_with_adapters_is_profiled_and_placed_for_training(kind: str) -> None:
    layers = model_of(QUANTISED[kind])
    model = nn.Sequential(*(Adapted(layers[index], 64) for index in (0, 2))).train()
    placement = placer.suggest(
        model,
        batch_of(QUANTISED[kind]),
        devices=["cpu:0", "cpu:1"],
        progress=False,
        constraints=placer.Constraints(min_devices=2),
    )
    # timings decide where the cut is, which need not be in the middle
    total = sum(device.memory.grad_bytes for device in placement.devices)
    assert total == 2 * 4 * (2 * 4 * 64 + 64)


def test_peft_adapters_over_bitsandbytes_layers_train_as_in_the_unsplit_model() -> None:
    # which peft imports by way of transformers, with or without its compiled operators
    torchvision_models()
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["0", "2"], r=4, lora_dropout=0.0, init_lora_weights=False
    )

    def made() -> nn.Module:
        model = model_of(QUANTISED["bitsandbytes nf4"])
        torch.manual_seed(1)
        adapted: nn.Module = peft.inject_adapter_in_model(config, model)
        return adapted.train()

    model, reference, x = made(), made(), batch_of(QUANTISED["bitsandbytes nf4"])
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update({"0": 0, "1": 0, "2": 1})
        flow.update_flow()
        train = flow.train_step(nn.functional.mse_loss)
        loss = train(x, x, chunks=2)
        layer: Any = model[2]
        assert devices.location(layer.base_layer.weight.quant_state.absmax) == torch.device(
            "cpu", 1
        )
    expected = nn.functional.mse_loss(reference(x), x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach().to(loss.dtype), **CLOSE)
    trained = [
        name for name, parameter in reference.named_parameters() if parameter.grad is not None
    ]
    assert any("lora_A" in name for name in trained)
    for (name, mine), its in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (its.grad is None), name
        if its.grad is not None:
            torch.testing.assert_close(mine.grad, its.grad, **CLOSE, msg=name)
