"""Which pipelines a training step makes and keeps, and what it does where one cannot be."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from unverified import unverified

from placer import DataFlow
from placer.executor.training.training_pipeline import TrainingPipeline
from placer.testing import logical_devices


def test_the_latest_eight_shapes_are_kept() -> None:
    model = nn.Sequential(nn.Conv1d(1, 1, 3), nn.Conv1d(1, 1, 3))
    flow = DataFlow(model, device_ids=2)
    flow.layer_gpus.update({"0": 0, "1": 1})
    flow.update_flow()
    step = flow.train_step(lambda output, target: output.square().mean())
    for size in [*range(6, 16), 6]:
        inputs = torch.randn(2, 1, size)
        loss = step(inputs, None)
        torch.testing.assert_close(loss, model(inputs).square().mean().detach())
    assert len(step.pipelines) == 8


def test_moving_the_layers_between_steps_keeps_training_right() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    whole = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole))
    inputs, target = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    with logical_devices(2):
        flow = DataFlow(model)
        step = None
        for place in (0, 1):
            flow.layer_gpus["1"] = place
            flow.update_flow()
            step = step or flow.train_step(functional.mse_loss, ours)
            step(inputs, target, chunks=3)
    for _ in range(2):
        theirs.zero_grad()
        functional.mse_loss(whole(inputs), target).backward()
        theirs.step()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach())


def test_weights_that_are_assigned_between_steps_are_those_that_train() -> None:
    # Pipelines were told apart by the address of their capture, which a later capture may take
    # over.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2)).double()
    inputs, target = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    flow = DataFlow(model)
    flow.update_flow()
    step = flow.train_step(functional.mse_loss)
    for scale in (1.0, 2.0, 3.0):
        new = {name: torch.full_like(value, scale) for name, value in model.state_dict().items()}
        flow.load_state_dict(new, assign=True)
        expected = functional.mse_loss(torch.nn.functional.linear(inputs, *new.values()), target)
        torch.testing.assert_close(step(inputs, target), expected)


def test_without_memory_for_a_further_shape_the_passes_of_others_are_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    flow = DataFlow(model, device_ids=2)
    flow.layer_gpus.update({"0": 0, "1": 1})
    flow.update_flow()
    step = flow.train_step(functional.mse_loss)
    prepare, held = TrainingPipeline.prepare, 0

    def with_room_for_one(self: TrainingPipeline, *args: Any, **options: Any) -> None:
        if len(step.pipelines) > 1:
            raise torch.OutOfMemoryError("no room")
        prepare(self, *args, **options)

    monkeypatch.setattr(TrainingPipeline, "prepare", with_room_for_one)
    for size in (2, 4, 2):
        inputs, target = (
            torch.randn(size, 4, dtype=torch.float64),
            torch.randn(size, 2, dtype=torch.float64),
        )
        expected = functional.mse_loss(model(inputs), target).detach()
        with (
            pytest.warns(UserWarning, match=r"in addition to the passes of 1 other\(s\)")
            if held
            else nullcontext()
        ):
            torch.testing.assert_close(step(inputs, target), expected)
        held = len(step.pipelines)
        assert held == 1


def test_without_memory_for_a_further_step_the_passes_of_others_are_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A step with another schedule ran out of memory beside the one that had been tried before.
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    flow, other = DataFlow(model, device_ids=2), DataFlow(copy.deepcopy(model), device_ids=2)
    steps = []
    for one, schedule in ((other, "1f1b"), (flow, "1f1b"), (flow, "zero-bubble")):
        one.layer_gpus.update({"0": 0, "1": 1})
        one.update_flow()
        steps.append(one.train_step(functional.mse_loss, schedule=schedule))
    prepare = TrainingPipeline.prepare

    def with_room_for_one(self: TrainingPipeline, *args: Any, **options: Any) -> None:
        if sum(len(step.pipelines) for step in steps[1:]) > 1:
            raise torch.OutOfMemoryError("no room")
        prepare(self, *args, **options)

    monkeypatch.setattr(TrainingPipeline, "prepare", with_room_for_one)
    inputs, target = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    expected = functional.mse_loss(model(inputs), target).detach()
    for turn, number in enumerate((0, 1, 2, 1)):
        with (
            pytest.warns(UserWarning, match=r"in addition to the passes of 1 other\(s\)")
            if turn > 1
            else nullcontext()
        ):
            torch.testing.assert_close(steps[number](inputs, target, chunks=2), expected)
        # the other flow keeps its own
        assert [len(step.pipelines) for step in steps] == [1, number == 1, number == 2]


class _Whole(nn.Module):
    """Does something else where the batch is small."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        result: Tensor = self.last(y.tanh() if x.shape[0] >= 3 else y)
        return result


def test_micro_batches_are_of_one_size_where_the_model_does_otherwise_with_the_last_one() -> None:
    model = _Whole().double()
    whole = copy.deepcopy(model)
    # micro-batches of another size do something else
    flow = unverified(DataFlow(model, device_ids=2))
    flow.layer_gpus.update({"first": 0, "last": 1})
    flow.update_flow()
    step = flow.train_step(functional.mse_loss)
    inputs, target = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    with pytest.warns(
        UserWarning,
        match="micro-batches are 2 of 4, not 3; a batch whose size 3 divides keeps them",
    ):
        loss = step(inputs, target, chunks=3)
    torch.testing.assert_close(loss, functional.mse_loss(whole(inputs), target).detach())
    (pipeline,) = step.pipelines
    assert pipeline.sizes == (4, 4)
