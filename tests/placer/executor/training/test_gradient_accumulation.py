"""Micro-batches of unlike sizes, gradients of several batches, clipping and scaling equal the
unsplit model's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow
from placer.errors import InputError
from placer.executor.engine.fill_drain import micro_batch_sizes
from placer.executor.training.training_pipeline import Order
from placer.testing import logical_devices

WIDTH = 6


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
    ]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 2)).double()


def _batch(size: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, WIDTH, dtype=torch.float64, generator=generator)
    return inputs, torch.randn(size, 2, dtype=torch.float64, generator=generator)


def _placed(model: nn.Module, devices: int = 3) -> DataFlow:
    flow = DataFlow(model)
    for index, name in enumerate(flow.layer_gpus):
        flow.layer_gpus[name] = index * devices // len(flow.layer_gpus)
    flow.update_flow()
    return flow


def _same_gradients(model: nn.Module, whole: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, atol=1e-10, rtol=1e-10)


def _same_parameters(model: nn.Module, whole: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), atol=1e-10, rtol=1e-10)


@pytest.mark.covering
@pytest.mark.parametrize("schedule", ["1f1b", "fill-drain", "zero-bubble"])
@pytest.mark.parametrize(("size", "chunks"), [(7, 2), (10, 4), (14, 5), (11, 3)])
def test_a_smaller_last_micro_batch_counts_by_its_size(
    size: int, chunks: int, schedule: Order
) -> None:
    model = _model()
    whole = copy.deepcopy(model)
    inputs, target = _batch(size)
    with logical_devices(3):
        loss = _placed(model).train_step(functional.mse_loss, schedule=schedule)(
            inputs, target, chunks=chunks
        )
    expected = functional.mse_loss(whole(inputs), target)
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected.detach(), atol=1e-10, rtol=1e-10)
    _same_gradients(model, whole)


def test_a_smaller_last_batch_of_an_epoch_trains_like_the_unsplit_model() -> None:
    model = _model()
    whole = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole))
    with logical_devices(3):
        step = _placed(model).train_step(functional.mse_loss, ours)
        for seed, size in enumerate((12, 12, 7)):
            step(*_batch(size, seed), chunks=4)
    for seed, size in enumerate((12, 12, 7)):
        inputs, target = _batch(size, seed)
        theirs.zero_grad()
        functional.mse_loss(whole(inputs), target).backward()
        theirs.step()
    _same_parameters(model, whole)


@pytest.mark.parametrize("batch", range(1, 40))
def test_micro_batches_are_equal_but_for_a_last_one_of_at_least_half_their_size(batch: int) -> None:
    for chunks in range(1, 12):
        sizes = micro_batch_sizes(batch, chunks)
        assert sum(sizes) == batch and len(sizes) <= chunks
        assert set(sizes[:-1]) <= {sizes[0]} and sizes[0] / 2 <= sizes[-1] <= sizes[0]
        assert len(sizes) == chunks or batch % chunks != 0


def test_gradients_of_several_batches_add_up_until_one_updates() -> None:
    model = _model()
    whole = copy.deepcopy(model)
    ours, theirs = (torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, whole))
    with logical_devices(3):
        step = _placed(model).train_step(functional.mse_loss, ours)
        for _ in range(2):  # the second round begins at zero again
            for seed in range(3):
                step(*_batch(8, seed), chunks=4, update=seed == 2)
    for _ in range(2):
        theirs.zero_grad()
        for seed in range(3):
            inputs, target = _batch(8, seed)
            functional.mse_loss(whole(inputs), target).backward()
        theirs.step()
    _same_parameters(model, whole)


def test_gradients_add_up_over_batches_of_unlike_sizes_and_those_that_the_user_changed() -> None:
    model = _model()
    whole = copy.deepcopy(model)
    with logical_devices(3):
        step = _placed(model).train_step(functional.mse_loss)
        step(*_batch(8), chunks=4, update=False)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 0.5
        step(*_batch(6, 2), chunks=3)
    for (size, seed), weight in (((8, 1), 0.5), ((6, 2), 1.0)):
        inputs, target = _batch(size, seed)
        (functional.mse_loss(whole(inputs), target) * weight).backward()
    _same_gradients(model, whole)


def test_gradients_wait_for_a_step_with_another_loss_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    whole = copy.deepcopy(model)
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    flow.layer_gpus["2"] = 1
    flow.update_flow()
    x, target = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    first, second = flow.train_step(functional.mse_loss), flow.train_step(functional.l1_loss)
    for _ in range(2):
        first(x, target, chunks=2, update=False)
        second(x, target, chunks=2)
        whole.zero_grad()
        (functional.mse_loss(whole(x), target) + functional.l1_loss(whole(x), target)).backward()
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-10, rtol=1e-10)


def test_zero_grad_drops_gradients_that_wait() -> None:
    model = _model()
    whole = copy.deepcopy(model)
    with logical_devices(3):
        step = _placed(model).train_step(functional.mse_loss)
        step(*_batch(8), chunks=4, update=False)
        model.zero_grad()
        step(*_batch(8, 2), chunks=4)
    inputs, target = _batch(8, 2)
    functional.mse_loss(whole(inputs), target).backward()
    _same_gradients(model, whole)


class _Tied(nn.Module):
    """One weight, used first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.three.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.three(torch.tanh(self.two(torch.tanh(self.one(x)))))
        return result


def test_gradients_of_a_tied_weight_add_up_over_batches_too() -> None:
    torch.manual_seed(0)
    model = _Tied().double()
    whole = copy.deepcopy(model)
    batches = [
        (torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64))
        for _ in range(3)
    ]
    with logical_devices(3):
        step = _placed(model).train_step(functional.mse_loss)
        for inputs, target in batches:
            step(inputs, target, chunks=2, update=False)
    for inputs, target in batches:
        functional.mse_loss(whole(inputs), target).backward()
    _same_gradients(model, whole)


@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_clipping_is_by_the_norm_over_all_devices(max_norm: float) -> None:
    model = _model()
    whole = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, whole))
    inputs, target = _batch(8)
    with logical_devices(3):
        step = _placed(model).train_step(functional.mse_loss, ours, max_norm=max_norm)
        for _ in range(3):
            step(inputs, target, chunks=4)
    for _ in range(3):
        theirs.zero_grad()
        functional.mse_loss(whole(inputs), target).backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
        theirs.step()
    _same_parameters(model, whole)
    assert step.update.norm is not None
    torch.testing.assert_close(step.update.norm.cpu(), norm, atol=1e-10, rtol=1e-10)


def _momentum(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9)


def _fused(weights: Any) -> torch.optim.Optimizer:
    """Is given the scale and the overflows, and skips by itself."""
    return torch.optim.AdamW(weights, lr=0.1, fused=True)


def _scaled(
    infinite: int | None, max_norm: float | None, optimizer: Callable[[Any], torch.optim.Optimizer]
) -> tuple[nn.Module, nn.Module, Any, Any]:
    """Four steps with a scaler; the loss is infinite at one of them."""
    model = _model().float()
    whole = copy.deepcopy(model)
    ours, theirs = (optimizer(each.parameters()) for each in (model, whole))
    one, other = (
        torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)
    )
    inputs, target = (tensor.float() for tensor in _batch(8))

    def factor(index: int) -> float:
        return float("inf") if index == infinite else 1.0

    with logical_devices(3):
        step = _placed(model).train_step(functional.mse_loss, ours, scaler=one, max_norm=max_norm)
        for index in range(4):
            step(inputs * factor(index), target, chunks=4)
    for index in range(4):
        theirs.zero_grad()
        other.scale(functional.mse_loss(whole(inputs * factor(index)), target)).backward()
        if max_norm is not None:
            other.unscale_(theirs)
            nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
        other.step(theirs)
        other.update()
    return model, whole, one, other


@pytest.mark.covering
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("infinite", [None, 1])
@pytest.mark.parametrize("optimizer", [_momentum, _fused])
def test_a_grad_scaler_scales_skips_and_grows_as_on_the_unsplit_model(
    infinite: int | None, max_norm: float | None, optimizer: Callable[[Any], torch.optim.Optimizer]
) -> None:
    # Fused optimizers skip where one device had an overflow: they are told of three.
    model, whole, one, other = _scaled(infinite, max_norm, optimizer)
    assert one.get_scale() == other.get_scale()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach())


class _Apart(nn.Module):
    """Two layers of which the second gives the first no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.one(x)
        return y, self.two(y.detach())


def test_an_overflow_on_the_last_device_alone_skips_the_step_on_all() -> None:
    model = _Apart()
    before = copy.deepcopy(model.state_dict())
    inputs, target = (tensor.float() for tensor in _batch(8))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def loss_fn(output: tuple[Tensor, Tensor], goal: Tensor) -> Tensor:
        return functional.mse_loss(output[0], goal) + (output[1] * 1e37).mean()

    with logical_devices(2):
        step = _placed(model, 2).train_step(
            loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler
        )
        step(inputs, target, chunks=4)
    assert model.one.bias.grad is not None and model.two.bias.grad is not None
    assert model.one.bias.grad.isfinite().all() and model.two.bias.grad.isinf().any()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.cpu(), before[name])
    assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("max_norm", [0, -1.0, float("inf"), True, "1"])
def test_a_norm_that_cannot_be_is_named(max_norm: Any) -> None:
    with pytest.raises(InputError, match="max_norm="):
        DataFlow(_model()).train_step(functional.mse_loss, max_norm=max_norm)


def test_a_scaler_without_an_optimizer_is_named() -> None:
    with pytest.raises(InputError, match="give train_step the optimizer"):
        DataFlow(_model()).train_step(functional.mse_loss, scaler=torch.amp.GradScaler("cpu"))


def test_an_optimizer_that_needs_closures_is_named() -> None:
    model = _model()
    with pytest.raises(InputError, match="LBFGS evaluates the loss several times"):
        DataFlow(model).train_step(functional.mse_loss, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("size", [8, 7])
def test_a_loss_may_do_without_a_target(size: int) -> None:
    model, (inputs, _) = _model(), _batch(size)
    whole = copy.deepcopy(model)
    whole(inputs).square().mean().backward()
    with logical_devices(3):
        loss = _placed(model).train_step(lambda output, _: output.square().mean())(
            inputs, None, chunks=4
        )
    assert float(loss) == pytest.approx(float(whole(inputs).detach().square().mean()))
    for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), its.grad, atol=1e-10, rtol=1e-10)
