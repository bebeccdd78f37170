"""What the loss does not depend on gets no gradient, however many devices lie between the two."""

from __future__ import annotations

import pytest
import torch
from splitting import twins
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow
from placer.executor.training.training_pipeline import SCHEDULES, Order
from placer.testing import logical_devices


class _Stopped(nn.Module):
    """The third layer lets no gradient through to the first two; a fifth layer's result is not used
    at all."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four, self.five = (nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.three(self.two(self.one(x)).tanh()).detach() + x
        self.five(x)
        return self.four(x)


@pytest.mark.covering
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", [[], [0, 1, 2, 3]])
@pytest.mark.parametrize("size", [8, 7])
def test_layers_before_a_stopped_gradient_are_not_trained(
    schedule: Order, recompute: list[int], size: int
) -> None:
    # The stage that stopped it sent zeros back, by which weight decay changed the weights of the
    # stages before.
    model, whole = twins(_Stopped)
    ours, theirs = (
        torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5) for each in (model, whole)
    )
    inputs, target = (
        torch.randn(size, 4, dtype=torch.float64),
        torch.randn(size, 4, dtype=torch.float64),
    )
    with logical_devices(4):
        flow = DataFlow(model)
        flow.layer_gpus.update(one=0, two=1, three=2, four=3, five=3)
        flow.update_flow()
        flow.recompute = list(recompute)
        step = flow.train_step(functional.mse_loss, ours, schedule)
        for _ in range(2):
            step(inputs, target, chunks=2)
    for _ in range(2):
        theirs.zero_grad()
        functional.mse_loss(whole(inputs), target).backward()
        theirs.step()
    for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        torch.testing.assert_close(one.detach().cpu(), other.detach(), atol=1e-10, rtol=1e-10)
