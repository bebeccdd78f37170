"""A stage that runs forwards once more in its backward pass trains as the unsplit model, and keeps
nothing between."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from alive import Alive
from splitting import CapturedOnce
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow
from placer.errors import PlacementError
from placer.executor.training.stages.recomputed_stage import RecomputedStage
from placer.executor.training.stages.training_stage import TrainingStage
from placer.executor.training.training_pipeline import Order
from placer.schema import BatchOptions, Placement
from placer.testing import logical_devices
from placer.zoo import gpt

SCHEDULES: tuple[Order, ...] = ("1f1b", "fill-drain", "zero-bubble", "interleaved")
CHUNKS = 4


class _Awkward(nn.Module):
    """What a second forward pass can get wrong: running statistics, a counter that matters, and
    writes to inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.middle, self.act, self.count = (
            nn.Linear(4, 4),
            nn.LeakyReLU(0.5, inplace=True),
            _Counts(),
        )
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.first(x)))
        result: Tensor = self.last(self.count(self.act(self.middle(y).mul_(2)) + y))
        return result


COUNTED = BatchOptions(verify=False)
"""For models whose result depends on how many micro-batches there were before."""


class _Counts(nn.Module):
    """Its result depends on how often it was called."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.calls


def _flow(model: nn.Module, recompute: Any, places: Any = None, **options: Any) -> DataFlow:
    return _place(DataFlow(model, **options), recompute, places)


def _place(flow: DataFlow, recompute: Any, places: Any) -> DataFlow:
    for index, name in enumerate(flow.layer_gpus):
        flow.layer_gpus[name] = (
            index * 3 // len(flow.layer_gpus) if places is None else places[index]
        )
    flow.recompute = recompute
    flow.update_flow()
    return flow


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)


def _same(model: nn.Module, whole: nn.Module) -> None:
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(
            model.state_dict()[name].cpu(), value, atol=1e-10, rtol=1e-10, msg=name
        )


@pytest.fixture(scope="module")
def awkward() -> CapturedOnce:
    return CapturedOnce(_Awkward)


@pytest.mark.covering
@pytest.mark.parametrize(
    "places", [(0, 0, 1, 1, 2, 2), (0, 1, 0, 1, 2, 0)], ids=["in order", "back and forth"]
)
@pytest.mark.parametrize("recompute", [[0], [1, 2], ["cpu:0", "cpu:1", "cpu:2"]])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_steps_equal_the_unsplit_models(
    schedule: Order, recompute: Any, places: Any, awkward: CapturedOnce
) -> None:
    model, whole = awkward.model, awkward.reference
    ours, theirs = (
        torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in (model, whole)
    )
    inputs, target = _batch()
    with logical_devices(3), awkward.flow() as flow:
        flow.batch_options = COUNTED
        step = _place(flow, recompute, places).train_step(functional.mse_loss, ours, schedule)
        losses = [step(inputs, target, chunks=CHUNKS).cpu() for _ in range(2)]
    for loss in losses:
        theirs.zero_grad()
        expected = torch.zeros((), dtype=torch.float64)
        for part, goal in zip(inputs.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
            part_loss = functional.mse_loss(whole(part), goal) / CHUNKS
            part_loss.backward()
            expected += part_loss.detach()
        theirs.step()
        torch.testing.assert_close(loss, expected, atol=1e-10, rtol=1e-10)
    _same(model, whole)


def test_tied_weights_and_a_smaller_last_micro_batch_recompute_too() -> None:
    torch.manual_seed(0)
    model = gpt(layers=1, width=16, heads=2, context=8, vocabulary=11, tied=True).double()
    whole = copy.deepcopy(model)
    tokens, target = torch.randint(11, (7, 8)), torch.randint(11, (7, 8))

    def loss_fn(output: Tensor, goal: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), goal.flatten())

    with logical_devices(3):
        loss = _flow(model, [0, 1, 2]).train_step(loss_fn)(tokens, target, chunks=2)
    expected = loss_fn(whole(tokens), target)
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected.detach(), atol=1e-10, rtol=1e-10)
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.cpu(), other.grad, atol=1e-10, rtol=1e-10)


def test_dropout_is_the_same_in_both_passes_and_as_without_recomputation() -> None:
    losses, gradients = [], []
    for recompute in ([], [0, 1, 2]):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Dropout(0.5)))
        ).double()
        inputs, _ = _batch()
        with logical_devices(3):
            step = _flow(model, recompute).train_step(functional.mse_loss)
            torch.manual_seed(2)
            losses.append([step(inputs, inputs * 2, chunks=CHUNKS).cpu() for _ in range(2)])
        gradients.append(
            [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
        )
    torch.testing.assert_close(losses[0], losses[1], atol=0, rtol=0)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-12, rtol=1e-12)


def test_deferred_batch_norm_counts_a_micro_batch_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    whole = copy.deepcopy(model)
    with logical_devices(3):
        flow = _flow(model, [0, 1, 2], deferred_batch_norm=True)
        flow.train_step(functional.mse_loss)(*_batch(), chunks=CHUNKS)
    whole(_batch()[0])
    for (name, mine), its in zip(model.named_buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(mine.cpu(), its, msg=name)


def _most_activations(recompute: Any) -> int:
    """How many results of tanh are alive at once in a step of 8 micro-batches through 6 of them a
    device."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(4, 4), nn.Tanh())]
    model = nn.Sequential(*layers).double()
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    for index, name in enumerate(flow.layer_gpus):
        flow.layer_gpus[name] = index * 2 // len(layers)
    flow.recompute = recompute
    flow.update_flow()
    step = flow.train_step(functional.mse_loss, schedule="fill-drain")
    inputs = torch.randn(16, 4, dtype=torch.float64)
    step(inputs, inputs, chunks=8)
    gc.collect()
    with Alive(torch.ops.aten.tanh.default) as alive:
        step(inputs, inputs, chunks=8)
    return alive.most


def test_activations_of_one_micro_batch_a_device_are_alive_at_once() -> None:
    assert _most_activations([]) == 8 * 12  # fill-drain: of every micro-batch
    assert _most_activations([0, 1]) <= 12


def test_the_map_and_what_recomputes_can_be_changed_between_steps() -> None:
    torch.manual_seed(0)
    model = _Awkward().double()
    whole = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, whole))
    inputs, target = _batch()
    with logical_devices(3):
        flow = _flow(model, [])
        flow.batch_options = COUNTED
        step = flow.train_step(functional.mse_loss, ours)
        for recompute in ([], [0, 1], [2], []):
            flow.recompute = recompute
            step(inputs, target, chunks=2)
        flow.undo()
    for _ in range(4):
        theirs.zero_grad()
        for part, goal in zip(inputs.chunk(2), target.chunk(2), strict=True):
            (functional.mse_loss(whole(part), goal) / 2).backward()
        theirs.step()
    _same(model, whole)


def test_a_placement_says_which_devices_recompute() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    whole = copy.deepcopy(model)
    placement = Placement(
        status="feasible",
        objective="throughput",
        layer_devices={"0": "cpu:0", "1": "cpu:1", "2": "cpu:1"},
        granularity="submodule",
        training=True,
        chunks=CHUNKS,
        recompute=("cpu:1",),
    )
    with logical_devices(2):
        flow = DataFlow(model)
        flow.update_flow(placement)
        assert flow.recompute == ["cpu:1"]
        step = flow.train_step(functional.mse_loss)
        step(*_batch())
        stages = step.pipeline(*_batch())[0]
        assert stages is not None
        assert [type(stage) for stage in stages.stages] == [TrainingStage, RecomputedStage]
        flow.undo()
        assert flow.recompute == []
    functional.mse_loss(whole(_batch()[0]), _batch()[1]).backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.cpu(), other.grad, atol=1e-10, rtol=1e-10)


def test_a_device_to_recompute_on_that_is_none_is_named() -> None:
    with logical_devices(3):
        step = _flow(nn.Sequential(nn.Linear(4, 2)), ["cpu:7"]).train_step(functional.mse_loss)
        with pytest.raises(PlacementError, match="cpu:7"):
            step(torch.randn(4, 4), torch.randn(4, 2))
