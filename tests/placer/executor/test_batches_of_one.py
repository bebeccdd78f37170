"""A batch of one sample after larger ones: torch's captures hold for two samples or more, where
code may look at it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow
from placer.errors import StageError
from placer.testing import logical_devices


class BranchesOnOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        return self.second(hidden * 100 if len(inputs) == 1 else hidden)


def _placed(model: nn.Module) -> DataFlow:
    flow = DataFlow(model, device_ids=2)
    flow.layer_gpus.update({name: index % 2 for index, name in enumerate(flow.layer_gpus)})
    flow.update_flow()
    return flow


def test_a_branch_on_the_size_of_the_batch_is_taken_as_in_the_model() -> None:
    model = BranchesOnOne()
    whole = copy.deepcopy(model)
    with logical_devices(2):
        flow = _placed(model)
        for size in (4, 1, 3, 1):
            inputs = torch.randn(size, 4)
            torch.testing.assert_close(flow(inputs).cpu(), whole(inputs))


def test_one_sample_that_batch_norm_refuses_is_refused_and_leaves_the_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with logical_devices(2):
        flow = _placed(model)
        step = flow.train_step(functional.mse_loss)
        step(torch.randn(4, 4), torch.randn(4, 2), chunks=2)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with pytest.raises(StageError, match=r"layer '1'.*more than 1 value per channel"):
            step(torch.randn(1, 4), torch.randn(1, 2))
        with pytest.raises(StageError, match=r"layer '1'.*more than 1 value per channel"):
            step(torch.randn(3, 4), torch.randn(3, 2), chunks=3)
        assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
        step(torch.randn(6, 4), torch.randn(6, 2), chunks=2)
        assert not flow.not_captured_because
        assert all(buffer.isfinite().all() for buffer in model.buffers())
