"""On real GPUs: a recorded, pipelined training step equals the unsplit model's over the same
micro-batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gpu_cases import training_case
from torch import Tensor, nn
from torch.nn import functional
from unverified import unverified

from placer import DataFlow
from placer.executor.training.training_pipeline import Order

pytestmark = pytest.mark.usefixtures("exact")

CHUNKS = 8


def _spread(flow: DataFlow) -> None:
    """Over all GPUs, as many layers on each, in their order."""
    count, names = torch.cuda.device_count(), list(flow.layer_gpus)
    for index, layer in enumerate(names):
        flow.layer_gpus[layer] = index * count // len(names)
    flow.update_flow()


def _unsplit_step(
    whole: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any, x: Tensor, y: Tensor
) -> Tensor:
    """A step of the model on one GPU over the same micro-batches; its loss."""
    optimizer.zero_grad()
    total = torch.zeros((), dtype=torch.float64, device="cuda:0")
    for part, goal in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
        loss = loss_fn(whole(part), goal) / CHUNKS
        loss.backward()
        total += loss.detach()
    optimizer.step()
    return total


def _assert_same_state(model: nn.Module, whole: nn.Module) -> None:
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(
            model.state_dict()[key].cpu(), value.cpu(), atol=1e-7, rtol=1e-7, msg=key
        )


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_steps_of_many_lengths_are_recorded_when_a_length_comes_back(
    schedule: Order, recompute: bool
) -> None:
    model, inputs, target, loss_fn = training_case("tied gpt", 16)
    whole = copy.deepcopy(model).cuda(0)
    ours = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    theirs = torch.optim.SGD(whole.parameters(), lr=0.01, momentum=0.9)
    flow = unverified(DataFlow(model))
    _spread(flow)
    if recompute:
        flow.recompute = ["cuda:0"]
    step = flow.train_step(loss_fn, ours, schedule)
    came = {16}  # the first shape is recorded at once
    for length in (16, 9, 9, 12, 16, 9, 5, 12, 12, 5):
        loss = step(inputs[:, :length], target[:, :length], chunks=CHUNKS)
        expected = _unsplit_step(
            whole, theirs, loss_fn, inputs[:, :length].cuda(0), target[:, :length].cuda(0)
        )
        torch.testing.assert_close(loss.cpu(), expected.cpu(), atol=1e-8, rtol=1e-8)
        recorded = {stage.is_recorded for stage in step.pipelines[-1].stages}
        assert recorded == {length in came}
        came.add(length)
    assert step.not_recorded_because == {}
    _assert_same_state(model, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["1f1b", "fill-drain", "zero-bubble"])
@pytest.mark.parametrize("name", ["resnet18", "unet", "tied gpt"])
def test_three_recorded_steps_equal_the_unsplit_models(name: str, schedule: Order) -> None:
    model, inputs, target, loss_fn = training_case(name, 16)
    whole = copy.deepcopy(model).cuda(0)
    ours = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    theirs = torch.optim.SGD(whole.parameters(), lr=0.01, momentum=0.9)
    flow = DataFlow(model)
    _spread(flow)
    step = flow.train_step(loss_fn, ours, schedule)
    for _ in range(3):
        loss = step(inputs, target, chunks=CHUNKS)
        expected = _unsplit_step(whole, theirs, loss_fn, inputs.cuda(0), target.cuda(0))
        torch.testing.assert_close(loss.cpu(), expected.cpu(), atol=1e-8, rtol=1e-8)
    _assert_same_state(model, whole)
    reasons = [
        stage.not_recorded_because for pipeline in step.pipelines for stage in pipeline.stages
    ]
    assert reasons == [""] * len(reasons)  # every stage really ran as CUDA graphs


@pytest.mark.gpu
def test_dropout_differs_between_micro_batches_and_steps_under_replay() -> None:
    count = torch.cuda.device_count()
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    seen: list[Tensor] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).pow(2).mean()

    flow = DataFlow(model)
    flow.layer_gpus["2"] = count - 1
    flow.update_flow()
    step = flow.train_step(loss_fn)
    inputs, target = torch.randn(64, 8), torch.randn(64, 8)
    for _ in range(4):
        seen.append(step(inputs, target, chunks=4).cpu())
    assert len({float(loss) for loss in seen}) == len(seen)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("name", ["resnet18", "unet", "tied gpt"])
def test_passes_that_follow_leave_gradients_that_are_still_sent_as_they_are(
    name: str, schedule: Order
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices: gradients are sent")
    model, inputs, target, loss_fn = training_case(name, 16)
    flow = unverified(DataFlow(model))
    _spread(flow)
    step = flow.train_step(loss_fn, None, schedule)
    step(inputs, target, chunks=CHUNKS)
    sent = 0
    for stage in step.pipelines[0].stages:
        for slot in stage.slots:
            for run in (slot.passes["forward"], slot.passes["backward"]):
                run()
            there = [*slot.input_gradients.values()]
            before = [gradient.clone() for gradient in there]
            others = [
                run
                for other in stage.slots
                if other is not slot
                for run in (other.passes["forward"], other.passes["backward"])
            ]
            for run in (*others, slot.passes["weights"], slot.passes["forward"]):
                run()
                torch.cuda.synchronize(stage.device)
                assert all(torch.equal(now, then) for now, then in zip(there, before, strict=True))
            sent += len(there)
    assert sent


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["host", "pinned", "another GPU"])
def test_a_batch_may_be_overwritten_as_soon_as_a_step_returns(memory: str) -> None:
    torch.manual_seed(0)
    count = torch.cuda.device_count()
    if memory == "another GPU" and count < 2:
        pytest.skip("needs two CUDA devices")
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 4)
    ).double()
    whole = copy.deepcopy(model).cuda(0)
    flow = DataFlow(model)
    _spread(flow)
    step = flow.train_step(functional.mse_loss, None)
    for number in range(4):
        batch = [
            torch.randn(4096, 512, dtype=torch.float64),
            torch.randn(4096, 4, dtype=torch.float64),
        ]
        if memory == "another GPU":
            given = [tensor.cuda(count - 1 - index) for index, tensor in enumerate(batch)]
        else:
            given = [
                tensor.pin_memory() if memory == "pinned" else tensor.clone() for tensor in batch
            ]
        loss = step(*given, chunks=CHUNKS)
        for tensor in given:
            tensor.fill_(number)
        whole.zero_grad()
        expected = functional.mse_loss(whole(batch[0].cuda(0)), batch[1].cuda(0))
        expected.backward()
        torch.testing.assert_close(loss.cpu(), expected.detach().cpu(), atol=1e-9, rtol=1e-9)
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad.cpu(), atol=1e-9, rtol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("late", [0, -1])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "fill-drain"])
@pytest.mark.parametrize("name", ["resnet18", "unet", "tied gpt"])
def test_steps_that_overlap_since_one_device_is_late_equal_the_unsplit_models(
    name: str, schedule: Order, late: int
) -> None:
    count = torch.cuda.device_count()
    model, inputs, target, loss_fn = training_case(name, 16)
    batches = [(inputs.roll(turn, 0).cuda(0), target.roll(turn, 0).cuda(0)) for turn in range(6)]
    whole = copy.deepcopy(model).cuda(0)
    ours, theirs = (
        torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in (model, whole)
    )
    flow = DataFlow(model)
    _spread(flow)
    step = flow.train_step(loss_fn, ours, schedule)
    losses = []
    for batch in batches:
        losses.append(step(*batch, chunks=CHUNKS))
        with torch.cuda.device(range(count)[late]):
            # some 10 ms: all others go on with the next step
            torch.cuda._sleep(20_000_000)
    for loss, (x, y) in zip(losses, batches, strict=True):
        expected = _unsplit_step(whole, theirs, loss_fn, x, y)
        torch.testing.assert_close(loss.cpu(), expected.cpu(), atol=1e-8, rtol=1e-8)
    _assert_same_state(model, whole)


class _Branching(nn.Sequential):
    """Runs through hooks."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y if bool(y.sum() > -1e9) else -y


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:the model is not captured")
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("kind", [nn.Sequential, _Branching])
def test_the_loss_runs_on_the_gpu_of_the_last_layer(
    kind: type[nn.Sequential], is_last: bool
) -> None:
    """Its own tensors belong there, and what it makes on "cuda" is there."""
    torch.manual_seed(0)
    place = torch.device("cuda", torch.cuda.device_count() - 1 if is_last else 0)
    model = kind(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    whole = copy.deepcopy(model)
    flow = DataFlow(model)
    flow.layer_gpus.update({"0": 0 if is_last else torch.cuda.device_count() - 1, "2": place.index})
    flow.update_flow()
    weight, seen = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, device=place), []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.extend((output.device, target.device, torch.empty(0, device="cuda").device))
        return functional.cross_entropy(output, target, weight=weight, reduction="none").mean()

    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
    result = flow.train_step(loss)(x, y, chunks=2)
    assert set(seen) == {place}
    assert result.device == place
    expected = functional.cross_entropy(whole(x), y, weight=weight.cpu(), reduction="none").mean()
    expected.backward()
    torch.testing.assert_close(result.cpu(), expected.detach(), atol=1e-10, rtol=1e-10)
    for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), its.grad, atol=1e-10, rtol=1e-10)
