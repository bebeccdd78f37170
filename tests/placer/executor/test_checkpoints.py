"""A model with checkpoints of its own trains as the unsplit one, and keeps what it keeps."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from alive import Alive
from splitting import CapturedOnce
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from placer import DataFlow
from placer.executor.engine.checkpointed_segments import CheckpointedSegment
from placer.executor.training.training_pipeline import Order
from placer.testing import logical_devices


class _Block(nn.Module):
    """Its inner activation is what a checkpoint lets go."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(4, 6), nn.Linear(6, 4), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.two(self.drop(torch.tanh(self.one(x))))
        return result


class _Checkpointed(nn.Module):
    """Blocks that the user lets run again in the backward pass."""

    def __init__(
        self, reentrant: bool | None = False, dropout: float = 0.0, blocks: int = 3
    ) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(_Block(dropout) for _ in range(blocks))
        self.last = nn.Linear(4, 2)
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + (
                block(x)
                if self._reentrant is None
                else checkpoint(block, x, use_reentrant=self._reentrant)
            )
        result: Tensor = self.last(x)
        return result


def _flow(model: nn.Module, count: int = 3, fine: bool = True, **options: Any) -> DataFlow:
    return _place(DataFlow(model, fine_grained=fine, **options), count)


def _place(flow: DataFlow, count: int = 3) -> DataFlow:
    names = list(flow.layer_gpus)
    for index, name in enumerate(names):
        flow.layer_gpus[name] = index * count // len(names)
    flow.update_flow()
    return flow


def _batch(size: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(size, 4, dtype=torch.float64), torch.randn(size, 2, dtype=torch.float64)


@pytest.fixture(scope="module")
def kept() -> Callable[[bool], CapturedOnce]:
    """A model whose checkpoints are reentrant, or not."""
    return cache(lambda reentrant: CapturedOnce(lambda: _Checkpointed(reentrant)))


@pytest.mark.covering
@pytest.mark.parametrize("fine", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "fill-drain", "zero-bubble"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_steps_equal_the_unsplit_models(
    reentrant: bool, schedule: Order, fine: bool, kept: Callable[[bool], CapturedOnce]
) -> None:
    both = kept(reentrant)
    model, whole = both.model, both.reference
    ours, theirs = (
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, whole)
    )
    inputs, target = _batch()
    with logical_devices(3), both.flow(fine_grained=fine) as flow:
        step = _place(flow).train_step(functional.mse_loss, ours, schedule)
        losses = [step(inputs, target, chunks=4).cpu() for _ in range(2)]
    for loss in losses:
        theirs.zero_grad()
        expected = torch.zeros((), dtype=torch.float64)
        for part, goal in zip(inputs.chunk(4), target.chunk(4), strict=True):
            part_loss = functional.mse_loss(whole(part), goal) / 4
            part_loss.backward()
            expected += part_loss.detach()
        theirs.step()
        torch.testing.assert_close(loss, expected, atol=1e-10, rtol=1e-10)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(
            model.state_dict()[name].cpu(), value, atol=1e-10, rtol=1e-10, msg=name
        )


def test_a_call_of_the_flow_keeps_to_checkpoints_too() -> None:
    torch.manual_seed(0)
    model = _Checkpointed().double()
    whole = copy.deepcopy(model)
    inputs, _ = _batch()
    with logical_devices(3):
        flow = _flow(model)
        flow(inputs).pow(2).sum().backward()
        assert any(
            isinstance(part, CheckpointedSegment)
            for _, parts in flow.placed._plans.values()
            for part in parts
        )
    whole(inputs).pow(2).sum().backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.cpu(), other.grad, atol=1e-10, rtol=1e-10)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_dropout_is_the_same_in_both_passes(schedule: Order) -> None:
    losses, gradients = [], []
    for reentrant in (None, False):
        torch.manual_seed(0)
        model = _Checkpointed(reentrant, dropout=0.5).double()
        with logical_devices(3):
            step = _flow(model).train_step(functional.mse_loss, schedule=schedule)
            torch.manual_seed(2)
            losses.append([step(*_batch(), chunks=4).cpu() for _ in range(2)])
        gradients.append(
            [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
        )
    torch.testing.assert_close(losses[0], losses[1], atol=0, rtol=0)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-12, rtol=1e-12)


def _most_alive(reentrant: bool | None, schedule: Order) -> int:
    """How many inner activations are alive at once in a step of 8 micro-batches through 4 blocks on
    2 devices."""
    model = _Checkpointed(reentrant, blocks=4).double()
    step = _flow(model, 2, device_ids=["cpu:0", "cpu:1"]).train_step(
        functional.mse_loss, schedule=schedule
    )
    inputs, target = _batch(16)
    step(inputs, target, chunks=8)
    gc.collect()
    with Alive(torch.ops.aten.tanh.default) as alive:
        step(inputs, target, chunks=8)
    return alive.most


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("schedule", ["fill-drain", "1f1b"])
def test_what_a_checkpoint_lets_go_is_not_kept(schedule: Order) -> None:
    assert _most_alive(None, schedule) >= 6
    assert _most_alive(False, schedule) <= 2


class _Overwriting(nn.Module):
    """Parts of a checkpoint write in place to what the one before made, as ``ReLU(inplace=True)``
    does."""

    def __init__(self, normalises: bool = False, beside: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4) if normalises else nn.Identity()
        self.relu, self.other = nn.ReLU(inplace=True), nn.Linear(4, 2)
        self._beside = beside

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=False)

    def _inner(self, x: Tensor) -> Tensor:
        y = self.norm(self.one(x))
        beside = self.other(torch.tanh(y)) if self._beside else 0.0
        result: Tensor = self.two(self.relu(y)) + beside
        return result


@pytest.mark.covering
@pytest.mark.parametrize(
    "options", [{}, {"normalises": True}, {"beside": True}], ids=["", "norm", "beside"]
)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("fine", [True, False])
def test_parts_of_a_checkpoint_that_overwrite_what_they_read_train_as_in_the_unsplit_model(
    options: dict[str, bool], count: int, fine: bool
) -> None:
    torch.manual_seed(0)
    model = _Overwriting(**options).double()
    reference = copy.deepcopy(model)
    inputs, target = _batch()
    functional.mse_loss(reference(inputs), target).backward()
    with logical_devices(count):
        flow = _flow(model, count, fine)
        step = flow.train_step(functional.mse_loss)
        step(inputs, target, chunks=1)
        stepped = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        functional.mse_loss(flow(inputs), target.to(flow.output_device)).backward()
    assert flow.not_captured_because == ""
    for parameter, one, expected in zip(
        model.parameters(), stepped, reference.parameters(), strict=True
    ):
        torch.testing.assert_close(one, expected.grad, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(parameter.grad, expected.grad, atol=1e-10, rtol=1e-10)
