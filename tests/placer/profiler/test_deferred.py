"""What a backward pass by input leaves to the one by weight: gradients of results, 4 bytes an
element."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import tokens_loss
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow, profile
from placer.executor.training.stages.training_slot import TrainingSlot
from placer.executor.training.stages.training_stage import TrainingStage
from placer.profiler.memory import measure_memory
from placer.testing import logical_devices
from placer.zoo import gpt, resnet18, unet

BATCH, INSIDE, OUTSIDE = 8, 16, 32
CPU = torch.device("cpu")
linear: Callable[..., Tensor] = torch.ops.aten.linear.default
conv2d: Callable[..., Tensor] = torch.ops.aten.conv2d.default


def _tensor(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape, requires_grad=grad)


def _deferred(trial: Any, training: bool = True) -> int:
    return measure_memory(trial, training=training).deferred_bytes


def test_a_linear_layer_leaves_the_gradient_of_what_it_writes(make_trial: Any) -> None:
    given: Any = linear, [_tensor(BATCH, INSIDE)], [_tensor(OUTSIDE, INSIDE), _tensor(OUTSIDE)]
    assert _deferred(make_trial(*given)) == 4 * BATCH * OUTSIDE


def test_what_has_no_weights_that_can_wait_leaves_nothing(make_trial: Any) -> None:
    assert _deferred(make_trial(functional.relu, [_tensor(BATCH, INSIDE)])) == 0
    frozen = make_trial(linear, [_tensor(BATCH, INSIDE)], [_tensor(OUTSIDE, INSIDE, grad=False)])
    assert _deferred(frozen) == 0
    gain = [_tensor(INSIDE), _tensor(INSIDE)]
    norm = make_trial(
        lambda x, a, b: functional.layer_norm(x, [INSIDE], a, b), [_tensor(BATCH, INSIDE)], gain
    )
    assert _deferred(norm) == 0


def test_a_convolution_inside_a_layer_leaves_the_gradient_of_its_own_result(
    make_trial: Any,
) -> None:
    def block(x: Tensor, weight: Tensor) -> Tensor:
        return functional.max_pool2d(torch.relu_(conv2d(x, weight, None, [1, 1], [1, 1])), 2)

    trial = make_trial(block, [_tensor(2, 3, 10, 10)], [_tensor(8, 3, 3, 3)])
    assert _deferred(trial) == 4 * 2 * 8 * 10 * 10


def test_a_gradient_that_two_operations_wait_with_is_there_once(make_trial: Any) -> None:
    def pair(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return linear(x, first) + linear(x, second)

    trial = make_trial(
        pair, [_tensor(BATCH, INSIDE)], [_tensor(OUTSIDE, INSIDE), _tensor(OUTSIDE, INSIDE)]
    )
    assert _deferred(trial) == 4 * BATCH * OUTSIDE


def test_a_sum_of_gradients_is_another_than_each_of_them(make_trial: Any) -> None:
    def residual(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = linear(x, first)
        return y + linear(y, second)

    trial = make_trial(
        residual, [_tensor(BATCH, INSIDE)], [_tensor(INSIDE, INSIDE), _tensor(INSIDE, INSIDE)]
    )
    assert _deferred(trial) == 2 * 4 * BATCH * INSIDE


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]], Any]] = {
    "resnet18": (
        resnet18,
        lambda size: (torch.randn(size, 3, 32, 32), torch.randint(1000, (size,))),
        functional.cross_entropy,
    ),
    "unet": (
        lambda: unet(width=4),
        lambda size: (torch.randn(size, 3, 32, 32), torch.randint(2, (size, 32, 32))),
        functional.cross_entropy,
    ),
    "gpt": (
        lambda: gpt(layers=1, width=16, heads=2, context=8, vocabulary=11),
        lambda size: (torch.randint(11, (size, 8)), torch.randint(11, (size, 8))),
        tokens_loss,
    ),
}


def _waiting(slot: TrainingSlot) -> dict[str, int]:
    """By layer, the bytes of the gradients that a slot's queue holds."""
    storages: dict[str, dict[int, int]] = defaultdict(dict)
    for addition in slot.deferred:
        assert addition.layer is not None
        storage = addition.gradient.untyped_storage()
        storages[addition.layer][storage.data_ptr()] = storage.nbytes()
    return {layer: sum(sizes.values()) for layer, sizes in storages.items()}


@pytest.mark.covering(every=3, first=2)
@pytest.mark.parametrize("name", MODELS)
def test_a_profile_says_what_the_weight_passes_of_a_step_wait_with(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, data, loss_fn = MODELS[name]
    model, size, chunks = make(), 2, 3
    found: dict[str, int] = {}
    weights = TrainingStage.add_weight_gradients

    def watched(stage: TrainingStage, slot: TrainingSlot) -> None:
        found.update(_waiting(slot))
        weights(stage, slot)

    monkeypatch.setattr(TrainingStage, "add_weight_gradients", watched)
    said = profile(model, data(size)[0], [CPU], progress=False, repeats=1, granularity="submodule")
    with logical_devices(2):
        flow = DataFlow(model)
        for index, layer in enumerate(flow.layer_gpus):
            flow.layer_gpus[layer] = 2 * index // len(flow.layer_gpus)
        flow.update_flow()
        step = flow.train_step(loss_fn, torch.optim.SGD(model.parameters(), lr=0.01), "zero-bubble")
        inputs, target = data(size * chunks)
        step(inputs, target, chunks=chunks)
    assert found == {
        layer.name: layer.deferred_bytes for layer in said.layers if layer.deferred_bytes
    }
    assert len(found) > 1


def test_a_weight_pass_waits_with_a_gradient_in_the_place_where_it_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places: list[tuple[set[int], set[int]]] = []
    weights = TrainingStage.add_weight_gradients

    def watched(stage: TrainingStage, slot: TrainingSlot) -> None:
        waiting = {addition.gradient.untyped_storage().data_ptr() for addition in slot.deferred}
        places.append(
            (
                waiting,
                {gradient.untyped_storage().data_ptr() for gradient in slot.gradients.values()},
            )
        )
        weights(stage, slot)

    monkeypatch.setattr(TrainingStage, "add_weight_gradients", watched)
    model = nn.Sequential(nn.Linear(8, 1024), nn.Linear(1024, 4))
    found = profile(model, torch.randn(256, 8), [CPU], progress=False, repeats=1)
    assert [edge.deferred for edge in found.edges] == [True]
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update({"0": 0, "1": 1})
        flow.update_flow()
        step = flow.train_step(
            nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.01), "zero-bubble"
        )
        step(torch.randn(6, 8), torch.randn(6, 4), chunks=3)
    firsts = [(waiting, arrived) for waiting, arrived in places if arrived]
    assert firsts and all(waiting == arrived for waiting, arrived in firsts)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_gpus_weight_passes_wait_with_as_much_as_the_hosts(name: str) -> None:
    make, data, _ = MODELS[name]
    model, x = make(), data(2)[0]
    host, device = (
        profile(model, x, [place], progress=False, repeats=1, cache=False)
        for place in (CPU, "cuda:0")
    )
    assert [layer.deferred_bytes for layer in host.layers] == [
        layer.deferred_bytes for layer in device.layers
    ]
