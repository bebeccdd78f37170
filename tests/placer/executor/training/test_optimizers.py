"""Every optimizer of torch steps a model on several devices as it steps the unsplit one, LR schedulers included."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

from placer import DataFlow
from placer.executor.training.pipeline import Order
from placer.testing import logical_devices

WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "SGD foreach": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "SGD fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "Adam foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    "Adam fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adagrad fused": (torch.optim.Adagrad, {"lr": 0.1, "fused": True}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0, "foreach": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01, "foreach": True}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "foreach": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01, "foreach": True}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01, "foreach": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True, "foreach": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01, "foreach": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01, "foreach": True}),
}


def _models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    return model, copy.deepcopy(model)


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)


def _placed(model: nn.Module) -> DataFlow:
    flow = DataFlow(model)
    for index, name in enumerate(flow.layer_gpus):
        flow.layer_gpus[name] = index * 2 // len(flow.layer_gpus)
    flow.update_flow()
    return flow


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups, each with parameters on both devices."""
    weights = [parameter for name, parameter in model.named_parameters() if name.endswith("weight")]
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    return [{"params": weights}, {"params": biases, "lr": 0.02}]


@pytest.mark.parametrize("name", WAYS)
def test_three_steps_equal_the_unsplit_models(name: str) -> None:
    kind, options = WAYS[name]
    model, whole = _models()
    inputs, target = _batch()
    theirs = kind(_groups(whole), **options)
    with logical_devices(2):
        flow = _placed(model)
        ours = kind(_groups(model), **options)
        step = flow.train_step(functional.mse_loss, ours)
        for _ in range(3):
            step(inputs, target, chunks=4)
    for _ in range(3):
        theirs.zero_grad()
        functional.mse_loss(whole(inputs), target).backward()
        theirs.step()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), atol=1e-10, rtol=1e-10)


def test_every_optimizer_of_torch_was_tried_or_cannot_step_by_dense_gradients_of_any_shape() -> None:
    there = {
        name
        for name, item in vars(torch.optim).items()
        if isinstance(item, type) and issubclass(item, torch.optim.Optimizer) and item is not torch.optim.Optimizer
    }
    # LBFGS wants closures (and is refused), SparseAdam sparse gradients, Muon matrices alone.
    assert there - {kind.__name__ for kind, _ in WAYS.values()} <= {"LBFGS", "SparseAdam", "Muon"}


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=5),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 3)],
            [2],
        ),
    ],
    ids=["one cycle", "warm-up and cosine"],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_a_learning_rate_schedule_is_followed(scheduler: Any) -> None:
    model, whole = _models()
    inputs, target = _batch()
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, whole))
    one, other = scheduler(ours), scheduler(theirs)
    with logical_devices(2):
        step = _placed(model).train_step(functional.mse_loss, ours)
        for _ in range(4):
            step(inputs, target, chunks=4)
            one.step()
    for _ in range(4):
        theirs.zero_grad()
        functional.mse_loss(whole(inputs), target).backward()
        theirs.step()
        other.step()
    for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), its.detach(), atol=1e-10, rtol=1e-10)


def test_training_goes_on_from_a_checkpoint_of_four_devices_on_two() -> None:
    model, whole = _models()
    inputs, target = _batch()
    ours, theirs = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, whole))
    with logical_devices(4):
        flow = DataFlow(model)
        for index, name in enumerate(flow.layer_gpus):
            flow.layer_gpus[name] = index % 4
        flow.update_flow()
        flow.train_step(functional.mse_loss, ours)(inputs, target, chunks=4)
        saved = [
            {name: value.cpu() for name, value in model.state_dict().items()},
            torch.utils._pytree.tree_map_only(Tensor, Tensor.cpu, ours.state_dict()),
        ]
    assert list(saved[0]) == list(whole.state_dict())  # the model's own keys
    later, _ = _models()
    with torch.no_grad():
        for parameter in later.parameters():
            parameter.zero_()
    with logical_devices(2):
        flow = _placed(later)
        flow.load_state_dict(saved[0])
        again = torch.optim.Adam(later.parameters(), lr=0.01)
        again.load_state_dict(saved[1])
        flow.train_step(functional.mse_loss, again)(inputs, target, chunks=2)
    for _ in range(2):
        theirs.zero_grad()
        functional.mse_loss(whole(inputs), target).backward()
        theirs.step()
    for mine, its in zip(later.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), its.detach(), atol=1e-10, rtol=1e-10)


class _Spare(nn.Module):
    """A layer whose result the loss does not see, one that nothing calls, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.uncalled = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen, self.last = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        return self.last(self.frozen(x)), self.spare(x)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_parameters_without_a_gradient_are_left_alone_by_the_optimizer(schedule: Order) -> None:
    # A gradient of zeros would let weight decay shrink them, which None does not.
    torch.manual_seed(0)
    model = _Spare().double()
    whole = copy.deepcopy(model)
    inputs, target = _batch()
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5) for each in (model, whole))
    with logical_devices(2):
        step = _placed(model).train_step(lambda output, goal: functional.mse_loss(output[0], goal), ours, schedule)
        for _ in range(2):
            step(inputs, target, chunks=4)
    for _ in range(2):
        theirs.zero_grad()
        functional.mse_loss(whole(inputs)[0], target).backward()
        theirs.step()
    for (name, mine), its in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), its.detach(), atol=1e-10, rtol=1e-10, msg=name)
        assert (mine.grad is None) == (its.grad is None), name
