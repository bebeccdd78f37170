"""Every optimizer of torch steps a model on several devices as it steps the unsplit one, LR
schedulers included."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

from placer import DataFlow, InputError, devices
from placer.executor.training.training_pipeline import Order
from placer.optimizers import OptimizerState
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
    "RMSprop": (
        torch.optim.RMSprop,
        {"lr": 0.01, "momentum": 0.9, "centered": True, "foreach": True},
    ),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01, "foreach": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01, "foreach": True}),
}


def _models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)
    ).double()
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


def _assert_equals_steps(
    model: nn.Module, whole: nn.Module, optimizer: torch.optim.Optimizer, count: int
) -> None:
    """Assert that a trained model equals the unsplit one after so many steps of it."""
    inputs, target = _batch()
    for _ in range(count):
        optimizer.zero_grad()
        functional.mse_loss(whole(inputs), target).backward()
        optimizer.step()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), atol=1e-10, rtol=1e-10)


@pytest.mark.covering(every=4)
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
    _assert_equals_steps(model, whole, theirs, 3)


@pytest.mark.parametrize("name", ["ASGD", "Rprop", "Adagrad", "RMSprop", "NAdam", "RAdam"])
def test_a_step_after_every_layer_moved_equals_the_unsplit_models(name: str) -> None:
    # The ``step`` of ASGD stayed on the old device of its layer.
    kind, options = WAYS[name]
    model, whole = _models()
    inputs, target = _batch()
    theirs = kind(_groups(whole), **options)
    with logical_devices(3):
        flow = _placed(model)
        ours = kind(_groups(model), **options)
        step = flow.train_step(functional.mse_loss, ours)
        step(inputs, target, chunks=4)
        for layer in flow.layer_gpus:
            flow.layer_gpus[layer] += 1
        flow.update_flow()
        for _ in range(2):
            step(inputs, target, chunks=4)
    _assert_equals_steps(model, whole, theirs, 3)


def test_every_optimizer_of_torch_was_tried_or_cannot_step_by_dense_gradients_of_any_shape() -> (
    None
):
    there = {
        name
        for name, item in vars(torch.optim).items()
        if isinstance(item, type)
        and issubclass(item, torch.optim.Optimizer)
        and item is not torch.optim.Optimizer
    }
    # LBFGS wants closures (and is refused), SparseAdam sparse gradients, Muon matrices alone.
    assert there - {kind.__name__ for kind, _ in WAYS.values()} <= {"LBFGS", "SparseAdam", "Muon"}


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=5),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, total_iters=2),
                lr_scheduler.CosineAnnealingLR(optimizer, 3),
            ],
            [2],
        ),
    ],
    ids=["one cycle", "warm-up and cosine"],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_a_learning_rate_schedule_is_followed(scheduler: Any) -> None:
    model, whole = _models()
    inputs, target = _batch()
    ours, theirs = (
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, whole)
    )
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
    _assert_equals_steps(later, whole, theirs, 2)


class _Spare(nn.Module):
    """A layer that the loss ignores, a layer that is never called, and a frozen layer."""

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
    ours, theirs = (
        torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5) for each in (model, whole)
    )
    with logical_devices(2):
        step = _placed(model).train_step(
            lambda output, goal: functional.mse_loss(output[0], goal), ours, schedule
        )
        for _ in range(2):
            step(inputs, target, chunks=4)
    for _ in range(2):
        theirs.zero_grad()
        functional.mse_loss(whole(inputs)[0], target).backward()
        theirs.step()
    for (name, mine), its in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(
            mine.detach().cpu(), its.detach(), atol=1e-10, rtol=1e-10, msg=name
        )
        assert (mine.grad is None) == (its.grad is None), name


class _SharpnessAware(torch.optim.SGD):
    """Steps twice over a closure that it must be given."""

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


class _ByKeyword(torch.optim.SGD):
    def step(self, *, evaluate: Callable[[], float]) -> None:  # type: ignore[override]
        evaluate()


class _ThinksItHasADefault(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "this optimizer requires a closure"


class _CallsNone(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return closure()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, _SharpnessAware, _ByKeyword])
@pytest.mark.parametrize("listed", [False, True])
def test_an_optimizer_whose_step_needs_a_closure_is_refused_by_name(
    kind: Any, listed: bool
) -> None:
    model, _ = _models()
    optimizer = kind(model.parameters(), lr=0.1)
    # puts another function in the place of step
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    given = [torch.optim.SGD(model.parameters(), lr=0.1), optimizer] if listed else optimizer
    with pytest.raises(
        InputError, match=rf"{kind.__name__} evaluates the loss several times.*AdamW"
    ):
        DataFlow(model).train_step(functional.mse_loss, given)
    with pytest.raises(InputError, match=kind.__name__):
        OptimizerState(kind)


@pytest.mark.parametrize("kind", [_ThinksItHasADefault, _CallsNone])
def test_an_optimizer_that_fails_without_a_closure_is_refused_by_name_when_it_is_stepped(
    kind: Any,
) -> None:
    model, _ = _models()
    with logical_devices(2):
        step = _placed(model).train_step(functional.mse_loss, kind(model.parameters(), lr=0.1))
        with pytest.raises(InputError, match=rf"{kind.__name__}.step\(\) failed without a closure"):
            step(*_batch())


def test_an_optimizer_may_take_any_number_of_arguments() -> None:
    class Free(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            return super().step(*args, **kwargs)

    model, _ = _models()
    before = model[0].weight.detach().clone()
    with logical_devices(2):
        _placed(model).train_step(functional.mse_loss, Free(model.parameters(), lr=0.1))(*_batch())
    assert not torch.equal(model[0].weight.detach().cpu(), before)


def _pair(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    """Two unlike optimizers, each with parameters on both devices."""
    groups = _groups(model)
    return [
        torch.optim.AdamW(groups[0]["params"], lr=0.05),
        torch.optim.SGD(groups[1]["params"], lr=0.1, **options),
    ]


@pytest.mark.covering
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_list_of_optimizers_steps_as_they_do_one_by_one(
    schedule: Order, max_norm: float | None
) -> None:
    model, whole = _models()
    inputs, target = _batch()
    theirs = _pair(whole, momentum=0.9)
    with logical_devices(2):
        ours = _pair(model, momentum=0.9)
        flow = _placed(model)
        step = flow.train_step(functional.mse_loss, ours, schedule, max_norm=max_norm)
        for number in range(4):
            # gradients of the second wait for the third
            step(inputs, target, chunks=4, update=number != 1)
            if number == 2:  # the state of both moves along
                flow.layer_gpus.update({"0": 1, "4": 0})
                flow.update_flow()
        for optimizer in ours:
            for parameter, kept in optimizer.state.items():
                at = {devices.location(value) for name, value in kept.items() if name != "step"}
                assert at == {devices.location(parameter)}
    for number in range(4):
        if number != 2:
            for optimizer in theirs:
                optimizer.zero_grad()
        functional.mse_loss(whole(inputs), target).backward()
        if number != 1:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
            for optimizer in theirs:
                optimizer.step()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), atol=1e-10, rtol=1e-10)
    saved = [optimizer.state_dict()["state"] for optimizer in (*ours, *theirs)]
    for mine, its in zip(saved[:2], saved[2:], strict=True):
        for kept, known in zip(mine.values(), its.values(), strict=True):
            for name, value in kept.items():
                torch.testing.assert_close(value.cpu(), known[name], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("overflow", [False, True])
def test_each_optimizer_of_a_list_skips_its_own_overflow(overflow: bool) -> None:
    """As in torch's example of several optimizers: each decides by its own gradients, and the scale
    is updated once."""
    model, whole = _models()
    inputs, target = _batch()
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]

    def infinite(gradient: Tensor) -> Tensor:
        return gradient * float("inf") if overflow else gradient

    model[4].weight.register_hook(infinite)
    whole[4].weight.register_hook(infinite)
    theirs, before = _pair(whole), [parameter.detach().clone() for parameter in whole.parameters()]
    with logical_devices(2), warnings.catch_warnings():
        # of the hook: micro-batches run one after another
        warnings.simplefilter("ignore")
        ours = _pair(model)
        _placed(model).train_step(functional.mse_loss, ours, scaler=scalers[0])(
            inputs, target, chunks=2
        )
    scalers[1].scale(functional.mse_loss(whole(inputs), target)).backward()
    for optimizer in theirs:
        scalers[1].step(optimizer)
    scalers[1].update()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), atol=1e-10, rtol=1e-10)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    moved = [
        not torch.equal(one.detach(), other)
        for one, other in zip(whole.parameters(), before, strict=True)
    ]
    # weights by the first optimizer, biases by the second
    assert moved == [not overflow, True] * 3


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda one: [], r"optimizer is \[\], an empty list"),
        (lambda one: [one, one], "one of them twice"),
        (lambda one: [one, 3], "optimizer is 3; give a torch.optim.Optimizer"),
        (lambda one: [one, type(one)], "the class SGD"),
    ],
)
def test_a_list_that_cannot_be_stepped_is_refused(wrong: Any, told: str) -> None:
    model, _ = _models()
    given = wrong(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InputError, match=told):
        DataFlow(model).train_step(functional.mse_loss, given)
    with pytest.raises(InputError, match="optimizer"):
        DataFlow(model).update_flow(optimizer=given)


def test_a_model_that_no_optimizer_of_a_list_holds_is_refused() -> None:
    (model, other), _ = _models(), None
    given = [
        torch.optim.SGD(other[0].parameters(), lr=0.1),
        torch.optim.SGD(other[2].parameters(), lr=0.1),
    ]
    with pytest.raises(InputError, match="holds no parameter of this Sequential"):
        DataFlow(model).train_step(functional.mse_loss, given)
