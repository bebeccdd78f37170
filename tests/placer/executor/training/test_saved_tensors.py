"""Hooks of saved tensors, as those of ``save_on_cpu``, see what passes keep; gradients stay what
they are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from placer import DataFlow
from placer.executor.training.training_pipeline import Order
from placer.testing import logical_devices


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_weights_are_found_where_hooks_hand_back_copies(schedule: Order) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)
    ).double()
    whole = copy.deepcopy(model)
    inputs, target = (
        torch.randn(4, 2, 5, dtype=torch.float64),
        torch.randn(4, 3, dtype=torch.float64),
    )
    with logical_devices(2):
        flow = DataFlow(model)
        for index, name in enumerate(flow.layer_gpus):
            flow.layer_gpus[name] = index // 2
        flow.update_flow()
        step = flow.train_step(nn.functional.mse_loss, None, schedule=schedule)
        with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor.clone()):
            loss = step(inputs, target, chunks=2)
    expected = nn.functional.mse_loss(whole(inputs), target)
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected.detach())
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
