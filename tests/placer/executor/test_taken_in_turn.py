"""A buffer that segments change is, for each micro-batch, what the ones before it left."""

from __future__ import annotations

import warnings

import pytest
import torch
from splitting import twins
from torch import Tensor, nn
from torch.nn import functional
from unverified import unverified

from placer import DataFlow
from placer.executor.training.training_pipeline import SCHEDULES, Order
from placer.testing import logical_devices


class _Centre(nn.Module):
    """Moves a buffer, and is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x - self.mean


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.centre, self.last = nn.Linear(4, 4), _Centre(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.centre(self.last(self.centre(self.first(x))))


class _Before(_Twice):
    """What one layer reads another one changes, behind it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.centre(self.last(self.first(x) * self.centre.mean.clone()))


class _Behind(_Twice):
    """What one layer changed is read behind another one."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.centre(self.first(x)).tanh()) * self.centre.mean


MODELS = pytest.mark.parametrize("make", [_Twice, _Before, _Behind])


def _placed(model: nn.Module, **options: bool) -> DataFlow:
    # micro-batches depend on one another
    flow = unverified(DataFlow(model, **options))
    flow.layer_gpus.update(first=0, centre=0, last=1)
    flow.update_flow()
    return flow


@pytest.mark.covering
@MODELS
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_takes_micro_batches_in_turn(make: type[nn.Module], schedule: Order) -> None:
    model, whole = twins(make)
    inputs, target = torch.randn(2, 8, 4, dtype=torch.float64)
    with logical_devices(2):
        step = _placed(model).train_step(functional.mse_loss, schedule=schedule)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            loss = step(inputs, target, chunks=4)
    assert bool(step.pipelines) == (make is _Behind)  # there the value goes along
    assert [str(each.message).split(":")[0] for each in told] == [
        "buffer 'centre.mean' is changed in one segment and used in another"
    ] * (make is not _Behind)
    expected = torch.zeros((), dtype=torch.float64)
    for x, y in zip(inputs.chunk(4), target.chunk(4), strict=True):
        part = functional.mse_loss(whole(x), y) / 4
        part.backward()
        expected += part.detach()
    torch.testing.assert_close(loss.cpu(), expected)
    torch.testing.assert_close(model.centre.mean.cpu(), whole.centre.mean)
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


@pytest.mark.covering
@MODELS
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("streamed", [True, False])
def test_calls_and_streams_take_micro_batches_in_turn(
    make: type[nn.Module], streamed: bool, chunks: int
) -> None:
    model, whole = twins(make)
    with logical_devices(2), torch.no_grad():
        flow = _placed(model)
        for _ in range(3):
            inputs = torch.randn(8, 4, dtype=torch.float64)
            results = (
                flow.stream(inputs.chunk(chunks)) if streamed else [flow(inputs, chunks=chunks)]
            )
            expected = torch.cat([whole(x) for x in inputs.chunk(chunks)])
            torch.testing.assert_close(torch.cat([y.cpu() for y in results]), expected)
    torch.testing.assert_close(model.centre.mean.cpu(), whole.centre.mean)


@pytest.mark.parametrize("deferred", [True, False])
def test_statistics_that_follow_whole_batches_hold_nobody_up(deferred: bool) -> None:
    class Normalised(_Twice):
        def __init__(self) -> None:
            super().__init__()
            self.centre = nn.BatchNorm1d(4)  # type: ignore[assignment]

    model, _ = twins(Normalised)
    inputs, target = torch.randn(2, 8, 4, dtype=torch.float64)
    with logical_devices(2), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = _placed(model, deferred_batch_norm=deferred).train_step(functional.mse_loss)
        step(inputs, target, chunks=4)
    assert len(step.pipelines) == deferred
    assert len(told) == (not deferred)
