"""Replicated stages with everything else that a training step offers."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from functools import partial
from math import lcm
from typing import Any

import pytest
import torch
from replicated import by_stage, replicated, unsplit_loss
from torch import Tensor, nn
from torch.nn import functional
from unverified import unverified

from placer import DataFlow, devices
from placer.errors import InputError, PlacementError, PlacerError, StageError
from placer.executor.training.stages.recomputed_stage import RecomputedStage
from placer.schema import BatchOptions, Placement, Profile, Replica
from placer.testing import logical_devices
from placer.zoo import gpt

TOLERANCE = {"atol": 1e-10, "rtol": 1e-10}


@pytest.fixture(autouse=True)
def four() -> Iterator[list[torch.device]]:
    with logical_devices(4) as places:
        yield places


class _Net(nn.Module):
    """An embedding whose weights the last layer shares, and layers between."""

    def __init__(self, tied: bool = False, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 6)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(8, 6)
        self.last = nn.Linear(6, 7, bias=False)
        if tied:
            self.last.weight = self.table.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.first(self.table(x))).tanh())
        result: Tensor = self.last(self.second(y).relu())
        return result


def _data(samples: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(7, (samples,)), torch.randint(7, (samples,))


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def _flow(model: nn.Module, placement: Placement) -> DataFlow:
    flow = DataFlow(model)
    flow.update_flow(placement)
    return unverified(flow)


def _same_state(model: nn.Module, whole: nn.Module) -> None:
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), value, msg=name, **TOLERANCE)


def _train_unsplit(
    model: nn.Module, optimizer: torch.optim.Optimizer, sizes: list[int], steps: int = 2
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        unsplit_loss(model, functional.cross_entropy, *_data(sum(sizes)), sizes)
        optimizer.step()


def _placed(shape: str, model: nn.Module, **fields: Any) -> Placement:
    """Return a placement that divides 8 samples into four parts of 2.

    Args:
        shape: the number of replicas of each stage, such as ``2-1``.
        model: the model.
        fields: of the placement.
    """
    counts = tuple(map(int, shape.split("-")))
    chunks = 4 // lcm(*counts)
    if len(set(counts)) == 1:
        return replicated(model, counts[0], len(counts), chunks=chunks, **fields)
    return by_stage(model, counts, chunks=chunks, **fields)


of_each_shape = pytest.mark.parametrize("shape", ["4", "2-2", "2-1", "1-2"])

OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": _adam,
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
}


@of_each_shape
@pytest.mark.covering(every=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_state_lies_with_the_owners_and_goes_into_one_state_dict(
    name: str, shape: str
) -> None:
    model, whole = _Net(), _Net()
    mine, theirs = (OPTIMIZERS[name](one.parameters()) for one in (model, whole))
    flow = _flow(model, _placed(shape, model))
    step = flow.train_step(functional.cross_entropy, mine)
    for _ in range(2):
        step(*_data())
    _train_unsplit(whole, theirs, [2, 2, 2, 2])
    _same_state(model, whole)
    for parameter, state in mine.state.items():
        for key, value in state.items():
            if key != "step" and isinstance(value, Tensor):
                assert devices.location(value) == devices.location(parameter)
    # a later run reads it
    later = OPTIMIZERS[name](model.parameters())
    later.load_state_dict(mine.state_dict())
    step = flow.train_step(functional.cross_entropy, later)
    for _ in range(2):
        step(*_data())
    _train_unsplit(whole, theirs, [2, 2, 2, 2])
    _same_state(model, whole)


def test_owners_are_divided_by_bytes() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))).double()
    flow = _flow(model, replicated(model, 4))
    loads = dict.fromkeys(range(4), 0)
    for parameter in flow.module.parameters():
        index = devices.location(parameter).index
        assert index is not None
        loads[index] += parameter.nbytes
    assert max(loads.values()) - min(loads.values()) <= 8 * 8 * 8


@pytest.mark.parametrize("shape", ["2", "2-2", "2-1", "1-2", "1-2-1"])
def test_tied_weights_get_the_gradients_of_all_their_uses(shape: str) -> None:
    model, whole = _Net(tied=True), _Net(tied=True)
    flow = _flow(model, _placed(shape, model))
    step = flow.train_step(functional.cross_entropy, _adam(model.parameters()))
    for _ in range(2):
        step(*_data())
    _train_unsplit(whole, _adam(whole.parameters()), [2, 2, 2, 2])
    _same_state(model, whole)


@of_each_shape
def test_frozen_layers_stay_and_may_be_unfrozen(shape: str) -> None:
    model, whole = _Net(), _Net()
    flow = _flow(model, _placed(shape, model))
    mine, theirs = _adam(model.parameters()), _adam(whole.parameters())
    step = flow.train_step(functional.cross_entropy, mine)
    for frozen in (True, False):
        for one in (model, whole):
            one.first.requires_grad_(not frozen)
        step(*_data())
        step(*_data())
        _train_unsplit(whole, theirs, [2, 2, 2, 2])
        _same_state(model, whole)


@of_each_shape
def test_gradients_may_wait_for_the_next_step(shape: str) -> None:
    model, whole = _Net(), _Net()
    flow = _flow(model, _placed(shape, model))
    step = flow.train_step(functional.cross_entropy, _adam(model.parameters()))
    theirs = _adam(whole.parameters())
    for update in (False, True, True):
        step(*_data(), update=update)
    for _ in range(2):
        unsplit_loss(whole, functional.cross_entropy, *_data(), [2, 2, 2, 2])
    theirs.step()
    _train_unsplit(whole, theirs, [2, 2, 2, 2], steps=1)
    _same_state(model, whole)


@of_each_shape
def test_gradients_are_clipped_over_all_owners(shape: str) -> None:
    model, whole = _Net(), _Net()
    flow = _flow(model, _placed(shape, model))
    step = flow.train_step(functional.cross_entropy, _adam(model.parameters()), max_norm=0.1)
    step(*_data())
    theirs = _adam(whole.parameters())
    unsplit_loss(whole, functional.cross_entropy, *_data(), [2, 2, 2, 2])
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    theirs.step()
    torch.testing.assert_close(step.update.norm.cpu(), norm, **TOLERANCE)
    _same_state(model, whole)


@of_each_shape
def test_a_gradient_scaler_unscales_on_all_owners(shape: str) -> None:
    model, whole = _Net(), _Net()
    flow = _flow(model, _placed(shape, model))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step = flow.train_step(functional.cross_entropy, _adam(model.parameters()), scaler=scaler)
    step(*_data())
    _train_unsplit(whole, _adam(whole.parameters()), [2, 2, 2, 2], steps=1)
    _same_state(model, whole)


@of_each_shape
def test_autocast_holds_in_every_replica(shape: str) -> None:
    model, whole = _Net().float(), _Net().float()
    flow = _flow(model, _placed(shape, model))
    with torch.autocast("cpu", torch.bfloat16):
        step = flow.train_step(functional.cross_entropy)
        step(*_data())
        unsplit_loss(whole, functional.cross_entropy, *_data(), [2, 2, 2, 2])
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize(("shape", "expected"), [("2-2", {0, 2}), ("2-1", {0, 1}), ("1-2", {0})])
def test_recomputation_changes_nothing(shape: str, expected: set[int], schedule: Any) -> None:
    model, whole = _Net(dropout=0.0), _Net()
    placement = _placed(shape, model, schedule=schedule, recompute=("cpu:0",))
    flow = _flow(model, placement)
    step = flow.train_step(functional.cross_entropy, _adam(model.parameters()))
    for _ in range(2):
        step(*_data())
    _train_unsplit(whole, _adam(whole.parameters()), [2, 2, 2, 2])
    _same_state(model, whole)
    (pipeline,) = step.pipelines
    again = {stage.device.index for stage in pipeline.stages if isinstance(stage, RecomputedStage)}
    assert again == expected


@pytest.mark.parametrize(("shape", "own"), [("2", [0, 2]), ("2-1", [0, 2]), ("1-2", [0, 1, 2, 3])])
def test_batch_statistics_are_those_of_the_first_replicas(shape: str, own: list[int]) -> None:
    model, whole = _Net(norm=True), _Net(norm=True)
    flow = _flow(model, _placed(shape, model))
    step = flow.train_step(functional.cross_entropy, _adam(model.parameters()))
    step(*_data())
    inputs, target = _data()
    before = copy.deepcopy(whole)
    unsplit_loss(whole, functional.cross_entropy, inputs, target, [2, 2, 2, 2])
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, **TOLERANCE)
    for part in own:  # of replica 0
        before(inputs.split(2)[part])
    for (name, mine), theirs in zip(model.named_buffers(), before.buffers(), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, msg=name, **TOLERANCE)
        assert devices.location(mine).index == 0


@of_each_shape
def test_hooks_on_gradients_run(shape: str) -> None:
    model, whole = _Net(), _Net()
    for one in (model, whole):
        one.first.weight.register_hook(lambda gradient: 2 * gradient)
    flow = _flow(model, _placed(shape, model))
    step = flow.train_step(functional.cross_entropy)
    with pytest.warns(UserWarning, match="has hooks"):
        step(*_data())
    unsplit_loss(whole, functional.cross_entropy, *_data(), [2, 2, 2, 2])
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, **TOLERANCE)


@of_each_shape
def test_a_sum_of_losses_stays_one(shape: str) -> None:
    model, whole = _Net(), _Net()
    flow = _flow(model, _placed(shape, model))
    step = flow.train_step(
        nn.CrossEntropyLoss(reduction="sum"), batch_options=BatchOptions(reduction="sum")
    )
    loss = step(*_data())
    inputs, target = _data()
    expected = functional.cross_entropy(whole(inputs), target, reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected.detach(), **TOLERANCE)
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, **TOLERANCE)


@of_each_shape
def test_a_mean_over_labels_counts_unequal_shares_of_them(shape: str) -> None:
    model, whole = _Net(), _Net()
    inputs, target = _data()
    target[:3] = -100
    step = _flow(model, _placed(shape, model)).train_step(nn.CrossEntropyLoss())
    loss = step(inputs, target)
    expected = functional.cross_entropy(whole(inputs), target)
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected.detach(), **TOLERANCE)
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, **TOLERANCE)


@pytest.mark.parametrize(
    "make",
    [
        partial(replicated, replicas=2, stages=2, samples=(3, 1), chunks=2),
        partial(by_stage, counts=(3, 1)),
        partial(by_stage, counts=(1, 2), chunks=2),
    ],
)
def test_results_and_values_come_in_the_order_of_the_samples(
    make: Callable[[nn.Module], Placement],
) -> None:
    model, whole = _Net(), _Net()
    flow = _flow(model, make(model))

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        return functional.cross_entropy(output, target), {"most": output.argmax(1)}

    inputs, target = _data()
    _, values, outputs = flow.train_step(loss_fn)(inputs, target, outputs=True)
    expected = whole(inputs).detach()
    torch.testing.assert_close(outputs.cpu(), expected, **TOLERANCE)
    torch.testing.assert_close(values["most"].cpu(), expected.argmax(1))


@of_each_shape
def test_inputs_get_their_gradients_from_all_replicas(shape: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    whole = copy.deepcopy(model)
    step = _flow(model, _placed(shape, model)).train_step(functional.cross_entropy)
    x = torch.randn(8, 5).double().requires_grad_()
    y = x.detach().clone().requires_grad_()
    target = torch.randint(3, (8,))
    step(x, target)
    functional.cross_entropy(whole(y), target).backward()
    torch.testing.assert_close(x.grad, y.grad, **TOLERANCE)


@of_each_shape
def test_the_first_batch_is_compared_with_the_whole(shape: str) -> None:
    model = _Net()
    flow = DataFlow(model)
    flow.update_flow(_placed(shape, model))
    step = flow.train_step(functional.cross_entropy, _adam(model.parameters()))
    whole = _Net()
    for _ in range(2):
        step(*_data())
    _train_unsplit(whole, _adam(whole.parameters()), [2, 2, 2, 2])
    _same_state(model, whole)


@of_each_shape
def test_a_small_transformer_trains(shape: str) -> None:
    torch.manual_seed(0)
    model = gpt(layers=2, width=16, heads=2, context=8, vocabulary=11).double()
    whole = copy.deepcopy(model)
    tokens, target = torch.randint(11, (8, 8)), torch.randint(11, (8, 8))

    def loss_fn(logits: Tensor, goal: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), goal.flatten())

    step = _flow(model, _placed(shape, model)).train_step(loss_fn, _adam(model.parameters()))
    theirs = _adam(whole.parameters())
    for _ in range(2):
        step(tokens, target)
        theirs.zero_grad()
        unsplit_loss(whole, loss_fn, tokens, target, [2, 2, 2, 2])
        theirs.step()
    _same_state(model, whole)


@of_each_shape
def test_a_failing_loss_leaves_the_model_as_it_was(shape: str) -> None:
    model = _Net(norm=True)
    flow = _flow(model, _placed(shape, model))
    fails = False

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if fails:
            raise ValueError("no loss")
        return functional.cross_entropy(output, target)

    step = flow.train_step(loss_fn, _adam(model.parameters()))
    step(*_data())
    before = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    fails = True
    with pytest.raises(StageError, match="no loss"):
        step(*_data())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.cpu(), before[name], atol=0, rtol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    fails = False
    step(*_data())


@of_each_shape
def test_undo_brings_everything_home(shape: str) -> None:
    model = _Net(norm=True)
    flow = _flow(model, _placed(shape, model))
    optimizer = _adam(model.parameters())
    flow.train_step(functional.cross_entropy, optimizer)(*_data())
    flow.undo()
    gc.collect()
    for tensor in (*model.parameters(), *model.buffers()):
        assert devices.location(tensor) == torch.device("cpu")
    model(_data()[0])
    flow.update_flow()
    assert flow.assignment is not None and flow.assignment.replication.count == 1


@of_each_shape
def test_calls_and_streams_answer_through_the_first_replicas(shape: str) -> None:
    model, whole = _Net(), _Net()
    flow = _flow(model, _placed(shape, model))
    inputs = _data()[0]
    expected = whole(inputs)
    torch.testing.assert_close(flow(inputs).cpu(), expected, **TOLERANCE)
    flow(inputs).sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, **TOLERANCE)
    flow.eval()
    for result in flow.stream([inputs, inputs]):
        torch.testing.assert_close(result.cpu(), expected.detach(), **TOLERANCE)
    with flow.applied() as applied:
        torch.testing.assert_close(applied(inputs).cpu(), expected.detach(), **TOLERANCE)


@of_each_shape
def test_a_call_follows_the_parameters_that_a_step_has_changed(shape: str) -> None:
    model, whole = _Net(), _Net()
    flow = _flow(model, _placed(shape, model))
    step = flow.train_step(functional.cross_entropy, _adam(model.parameters()))
    theirs = _adam(whole.parameters())
    for _ in range(2):
        flow.train()
        step(*_data())
        _train_unsplit(whole, theirs, [2, 2, 2, 2], steps=1)
        flow.eval()
        with torch.no_grad():
            torch.testing.assert_close(flow(_data()[0]).cpu(), whole(_data()[0]), **TOLERANCE)


@pytest.mark.parametrize(
    ("shape", "lanes"),
    [
        ("2-2", {"cpu:2 → cpu:0", "cpu:3 → cpu:1"}),
        ("2-1-1", {"cpu:1 → cpu:0", "cpu:0 → cpu:2", "cpu:1 → cpu:2", "cpu:2 → cpu:1"}),
    ],
)
def test_a_measurement_shows_every_replica(shape: str, lanes: set[str]) -> None:
    model = _Net()
    flow = _flow(model, _placed(shape, model))
    step = flow.train_step(functional.cross_entropy)
    step(*_data())
    found = flow.measure(*_data(), step=step)
    assert sorted(found.devices) == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert {row.lane for row in found.measured} >= lanes


def test_unlike_shares_are_measured_without_a_prediction() -> None:
    model = _Net()
    flow = _flow(model, replicated(model, 2, samples=(3, 1)))
    step = flow.train_step(functional.cross_entropy)
    assert flow.measure(*_data(), step=step).measured_ms > 0
    with pytest.raises(InputError, match="take 3, 1 samples of a micro-batch"):
        flow.measure(*_data(), step=step, profile=Profile.model_construct())


def test_what_cannot_be_replicated_is_refused() -> None:
    model = _Net(norm=True)
    flow = DataFlow(model, deferred_batch_norm=True)
    flow.update_flow(replicated(model, 2))
    with pytest.raises(InputError, match="deferred_batch_norm"):
        flow.train_step(functional.cross_entropy)(*_data())
    flow.undo()
    model.table = nn.Embedding(7, 6, max_norm=1.0).double()
    flow = _flow(model, replicated(model, 2))
    with pytest.raises(InputError, match="max_norm"):
        flow.train_step(functional.cross_entropy)(*_data())


def test_replicas_that_form_no_pipelines_are_refused() -> None:
    model = _Net()
    flow = DataFlow(model)
    good = replicated(model, 2, 2)
    one, two = (Replica(device=f"cpu:{index}", samples=1) for index in (1, 3))
    for replicas, message in (
        ({"cpu:1": (one,)}, r"\[1\].* need equally many"),
        ({"cpu:1": (one, Replica(device="cpu:3", samples=2))}, "need equally many"),
        ({"cpu:1": (two, one)}, "the device itself"),
        ({"cpu:1": (one, Replica(device="cpu:2", samples=1))}, "more than once"),
        ({"cpu:1": (one, Replica(device="cpu:9", samples=1))}, "cpu:9"),
    ):
        broken = good.model_copy(update={"replicas": {**good.replicas, **replicas}})
        with pytest.raises(PlacementError, match=message):
            flow.update_flow(broken)
    assert flow.assignment is None
    assert issubclass(PlacementError, PlacerError)


def test_batches_of_several_shapes_share_gradients_and_replicas() -> None:
    model, whole = _Net(), _Net()
    flow = _flow(model, replicated(model, 2))
    step = flow.train_step(functional.cross_entropy, _adam(model.parameters()))
    theirs = _adam(whole.parameters())
    for samples in (8, 6, 8, 6):
        step(*_data(samples))
        _train_unsplit(whole, theirs, [samples // 2] * 2, steps=1)
        _same_state(model, whole)
    first, second = step.pipelines
    assert first.weights is second.weights
