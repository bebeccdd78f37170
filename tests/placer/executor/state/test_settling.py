"""Where a model's own state lies that belongs to no layer by name, when several graphs use it in
different layers."""

from __future__ import annotations

import torch
from splitting import assert_same, step, twins
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow
from placer.testing import logical_devices

X = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)


class Scaled(nn.Module):
    """Training, the first layer uses the scale; evaluated, the last one does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.last(torch.relu(self.first(x) * self.scale))
        result: Tensor = torch.tanh(self.last(self.first(x)) * self.scale)
        return result


def test_graphs_that_want_the_same_state_elsewhere_are_right_in_turn() -> None:
    """Each moved it to its own layer, and the other's plan knew it where it had been."""
    model, reference = twins(Scaled)
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update(first=0, last=1)
        flow.update_flow()
        for training in (True, False, True, False):
            model.train(training), reference.train(training)
            assert_same(step(flow, model, (X,), {}), step(reference, reference, (X,), {}))


def test_steps_and_calls_in_turn_find_state_that_was_replaced_meanwhile() -> None:
    model, reference = twins(Scaled)
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update(first=0, last=1)
        flow.update_flow()
        train = flow.train_step(functional.mse_loss)
        for number in range(3):
            for each in (model, reference):
                each.scale = nn.Parameter(torch.full((4,), float(number), dtype=torch.float64))
            loss = train(X, X, chunks=2)
            torch.testing.assert_close(loss.cpu(), functional.mse_loss(reference(X), X).detach())
            assert_same(
                step(flow.eval(), model, (X,), {}), step(reference.eval(), reference, (X,), {})
            )
            flow.train(), reference.train()
