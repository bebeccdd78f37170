"""What a training step is given and requires a gradient has it afterwards, as from the unsplit
model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from splitting import CapturedOnce
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow
from placer.executor.training.training_pipeline import Order
from placer.testing import logical_devices

CHUNKS = 3
SCHEDULES: list[Order] = ["fill-drain", "1f1b", "zero-bubble", "interleaved"]


class _Model(nn.Module):
    """Read on two devices: a batch; on the last one: a scale that is no batch. The first layer may
    be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.middle, self.last = (
            nn.Linear(4, 4),
            nn.Tanh(),
            nn.Linear(4, 4),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y = self.middle(self.act(self.first(x)))
        result: Tensor = self.last((y + x) * scale)
        return result


class _Branching(_Model):
    """Runs through hooks."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 1e9 else -x, scale)


def _flow(model: nn.Module, recompute: bool = False) -> DataFlow:
    return _place(DataFlow(model, device_ids=3), recompute)


def _place(flow: DataFlow, recompute: bool = False) -> DataFlow:
    flow.layer_gpus.update(first=0, act=0, middle=1, last=2)
    flow.update_flow()
    flow.recompute = [0, 1, 2] if recompute else []
    return flow


def _unsplit(model: nn.Module, inputs: tuple[Any, ...], target: Tensor, size: int = 2) -> Tensor:
    parts = [inputs[0][at : at + size] for at in range(0, len(target), size)]
    losses = [
        functional.mse_loss(model(part, *inputs[1:]), goal) * (len(part) / len(target))
        for part, goal in zip(parts, target.split(size), strict=True)
    ]
    torch.stack(losses).sum().backward()
    return torch.stack(losses).sum().detach()


def _tensors(size: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((size, 4), (4,), (size, 2))
    ]


def _agree(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for ours, theirs in pairs:
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad, atol=1e-12, rtol=1e-10)


@pytest.fixture(scope="module")
def kept() -> Callable[[Callable[[], nn.Module], bool], CapturedOnce]:
    """A model of a kind, whose first layer is frozen or not."""

    def kept(kind: Callable[[], nn.Module], frozen: bool) -> CapturedOnce:
        def make() -> nn.Module:
            model = kind()
            model.get_submodule("first").requires_grad_(not frozen)
            return model

        return CapturedOnce(make)

    return cache(kept)


@pytest.mark.covering
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", [_Model, _Branching])
def test_leaves_have_their_gradients_which_add_up_over_steps(
    kind: Callable[[], nn.Module],
    schedule: Order,
    recompute: bool,
    frozen: bool,
    kept: Callable[[Callable[[], nn.Module], bool], CapturedOnce],
) -> None:
    both = kept(kind, frozen)
    model, whole = both.model, both.reference
    mine = [tensor.requires_grad_() for tensor in _tensors()]
    theirs = [tensor.requires_grad_() for tensor in _tensors()]
    with logical_devices(3), both.flow(device_ids=3) as flow:
        step = _place(flow, recompute).train_step(functional.mse_loss, schedule=schedule)
        for _ in range(2):
            loss = step((mine[0], mine[1]), mine[2], chunks=CHUNKS)
            whole.zero_grad()
            expected = _unsplit(whole, (theirs[0], theirs[1]), theirs[2])
            torch.testing.assert_close(loss.cpu(), expected)
        _agree(list(zip([*mine, *model.parameters()], [*theirs, *whole.parameters()], strict=True)))


@pytest.mark.parametrize("kind", [_Model, _Branching])
def test_a_gradient_goes_on_through_what_an_input_was_made_of(
    kind: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    model, before = kind().double(), nn.Linear(4, 4).double()
    whole, also_before = copy.deepcopy(model), copy.deepcopy(before)
    x, scale, target = _tensors(5)  # with a smaller last micro-batch
    ours, theirs = (
        torch.optim.SGD([*a.parameters(), *b.parameters()], 0.1)
        for a, b in ((model, before), (whole, also_before))
    )
    flow = _flow(model)
    step = flow.train_step(functional.mse_loss, ours)
    for _ in range(3):
        ours.zero_grad()
        step((before(x), scale), target, chunks=CHUNKS)
        theirs.zero_grad()
        _unsplit(whole, (also_before(x), scale), target)
        theirs.step()
    _agree(
        list(
            zip(
                [*before.parameters(), *model.parameters()],
                [*also_before.parameters(), *whole.parameters()],
                strict=True,
            )
        )
    )
    for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, its)


def test_inputs_that_require_none_and_a_step_without_gradients_around_it_are_given_none() -> None:
    model = _Model().double()
    x, scale, target = _tensors()
    step = _flow(model).train_step(functional.mse_loss)
    with torch.no_grad():
        step((x.requires_grad_(), scale), target, chunks=CHUNKS)
    assert x.grad is None and scale.grad is None
    step((x, scale), target, chunks=CHUNKS)
    assert x.grad is not None and scale.grad is None
    step((x.detach(), scale), target, chunks=CHUNKS)
    assert len(step.pipelines) == 2


def test_a_measurement_leaves_the_gradients_of_inputs_alone() -> None:
    model = _Model().double()
    x, scale, target = _tensors()
    flow = _flow(model)
    flow.measure(
        (x.requires_grad_(), scale),
        target,
        step=flow.train_step(functional.mse_loss),
        chunks=CHUNKS,
    )
    assert x.grad is None


class _Spectral(nn.Module):
    """What passes from device to device is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.there, self.back, self.last = (
            nn.Linear(6, 6),
            _There(),
            _Back(),
            nn.Linear(6, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.back(self.there(self.first(x))))
        return result


class _There(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x)


class _Back(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(x * x.abs(), n=6)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_gradients_of_complex_values_come_back_too(schedule: Order) -> None:
    torch.manual_seed(0)
    model = _Spectral().double()
    whole = copy.deepcopy(model)
    x, target = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update(first=0, there=0, back=1, last=1)
        flow.update_flow()
        flow.train_step(functional.mse_loss, schedule=schedule)(x, target, chunks=2)
        functional.mse_loss(whole(x), target).backward()
        _agree(list(zip(model.parameters(), whole.parameters(), strict=True)))
