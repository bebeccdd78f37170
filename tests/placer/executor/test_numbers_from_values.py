"""Numbers and shapes that depend on the values of tensors: no pass may keep those that it was
prepared with."""

from __future__ import annotations

import pytest
import torch
from splitting import twins
from torch import Tensor, nn
from torch.nn import functional
from unverified import unverified

from placer import DataFlow, capture_graph
from placer.errors import InputError
from placer.testing import logical_devices


class _Scaled(nn.Module):
    """The second layer reads a number that the first one's result gave."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y) * y.mean().item()


class _Averaged(_Scaled):
    """The second layer reads a number that a shape gave."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y) / y.shape[0]


class _Chosen(_Scaled):
    """How many rows there are depends on their values."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y[y[:, 0] > 0])


def _flow(model: nn.Module) -> DataFlow:
    flow = unverified(DataFlow(model))  # numbers are of all samples
    flow.layer_gpus.update(first=0, second=1)
    flow.update_flow()
    return flow


BATCHES = [torch.randn(8, 4, dtype=torch.float64) for _ in range(4)]


def test_only_numbers_from_values_are_marked_as_such() -> None:
    batch = torch.randn(8, 4)
    assert capture_graph(_Scaled(), batch, granularity="submodule").passes_value_numbers
    assert not capture_graph(_Averaged(), batch, granularity="submodule").passes_value_numbers


@pytest.mark.parametrize("make", [_Scaled, _Averaged, _Chosen])
def test_a_stream_gives_what_the_unsplit_model_gives(make: type[nn.Module]) -> None:
    model, whole = twins(make, training=False)
    with logical_devices(2):
        results = [result.cpu() for result in _flow(model).stream(BATCHES)]
    with torch.no_grad():
        for result, batch in zip(results, BATCHES, strict=True):
            torch.testing.assert_close(result, whole(batch), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("make", [_Scaled, _Averaged])
def test_a_training_step_gives_the_gradients_of_the_unsplit_model(make: type[nn.Module]) -> None:
    model, whole = twins(make)
    target = torch.randn(8, 2, dtype=torch.float64)
    with logical_devices(2):
        step = _flow(model).train_step(functional.mse_loss)
        for batch in BATCHES[:2]:
            loss = step(batch, target.to("cpu:0"), chunks=4)
            whole.zero_grad()
            parts = zip(batch.chunk(4), target.chunk(4), strict=True)
            expected = sum(functional.mse_loss(whole(x), y) / 4 for x, y in parts)
            assert isinstance(expected, Tensor)
            expected.backward()
            torch.testing.assert_close(loss.cpu(), expected.detach(), atol=1e-12, rtol=1e-12)
            for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
                assert ours.grad is not None and theirs.grad is not None
                torch.testing.assert_close(ours.grad.cpu(), theirs.grad, atol=1e-12, rtol=1e-12)


def test_a_shape_from_values_runs_through_hooks_and_says_so() -> None:
    model, whole = twins(_Chosen, training=False)
    with logical_devices(2), torch.no_grad():
        flow = _flow(model)
        results = [flow(batch).cpu() for batch in BATCHES]
    assert "depends on values of tensors" in flow.not_captured_because
    assert len({result.shape for result in results}) > 1
    with torch.no_grad():
        for result, batch in zip(results, BATCHES, strict=True):
            torch.testing.assert_close(result, whole(batch))


def test_a_step_that_is_no_pipeline_is_not_measured() -> None:
    model, _ = twins(_Scaled)
    with logical_devices(2):
        flow = _flow(model)
        step = flow.train_step(functional.mse_loss)
        with pytest.raises(InputError, match="reads a number that another took from a tensor"):
            flow.measure(BATCHES[0], torch.zeros(8, 2, dtype=torch.float64), step=step)
