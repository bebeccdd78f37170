"""A training step through the pipeline equals the unsplit model's over the same micro-batches."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from rows import row
from small_models import tokens_loss
from splitting import CapturedOnce
from torch import Tensor, nn
from torch.nn import functional
from unverified import unverified

from placer import DataFlow
from placer.errors import InputError
from placer.executor.training import training_pipeline
from placer.executor.training.stages.training_stage import TrainingStage
from placer.executor.training.training_pipeline import Order
from placer.schedule import Transfer
from placer.solver.solve import solve
from placer.testing import logical_devices
from placer.zoo import gpt, unet
from placer.zoo.resnet import BasicBlock


class _Complex(nn.Module):
    """Layers whose weights are complex, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 2, 3), nn.Linear(5, 3)
        self.middle = nn.Conv1d(2, 2, 2, dtype=torch.cdouble)
        self.linear = nn.Linear(7, 5, dtype=torch.cdouble)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        result: Tensor = self.last(
            self.linear(self.middle(torch.complex(y, y.tanh()))).abs().sum(1)
        )
        return result

    def to(self, dtype: torch.dtype) -> _Complex:  # type: ignore[override]
        """What is complex stays so."""
        for layer in (self.first, self.last):
            layer.to(dtype)
        return self


class _Residual(nn.Sequential):
    """A ResNet of 8 channels, one block of which halves the image."""

    def __init__(self) -> None:
        stem = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        halved = nn.Sequential(nn.Conv2d(8, 8, 1, stride=2), nn.BatchNorm2d(8))
        blocks = BasicBlock(8, 8), BasicBlock(8, 8, 2, halved), BasicBlock(8, 8)
        super().__init__(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


SCHEDULES: tuple[Order, ...] = ("1f1b", "fill-drain", "zero-bubble")


def _images(count: int) -> Tensor:
    return torch.randn(count, 3, 16, 16, dtype=torch.float64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]], Any]] = {
    "residual": (
        _Residual,
        lambda size: (_images(size), torch.randint(10, (size,))),
        functional.cross_entropy,
    ),
    "unet": (
        lambda: unet(width=4),
        lambda size: (_images(size), torch.randint(2, (size, 16, 16))),
        functional.cross_entropy,
    ),
    "complex": (
        _Complex,
        lambda size: (
            torch.randn(size, 1, 10, dtype=torch.float64),
            torch.randn(size, 3, dtype=torch.float64),
        ),
        functional.mse_loss,
    ),
    "tied gpt": (
        lambda: gpt(layers=3, width=16, heads=2, context=8, vocabulary=11, tied=True),
        lambda size: (torch.randint(11, (size, 8)), torch.randint(11, (size, 8))),
        tokens_loss,
    ),
}


Optimizer = Callable[[Any], torch.optim.Optimizer]
Compare = Callable[..., None]


def _sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.01, momentum=0.9)


class _Unsplit(NamedTuple):
    """A batch, and what training on it leaves of the unsplit model."""

    inputs: Tensor
    target: Tensor
    losses: list[Tensor]
    state: dict[str, Tensor]


@pytest.fixture(scope="module")
def compare() -> Compare:
    """Trains a model split over three stand-ins, and compares losses, parameters and buffers with
    the unsplit one's.

    Each model is captured once, and once for a batch is its copy trained unsplit.
    """
    captured_once = cache(lambda name: CapturedOnce(MODELS[name][0]))

    @cache
    def unsplit(name: str, chunks: int, steps: int, size: int, optimizer: Optimizer) -> _Unsplit:
        _, data, loss_fn = MODELS[name]
        whole = copy.deepcopy(captured_once(name).reference)
        torch.manual_seed(1)
        inputs, target = data(size)
        losses, theirs = [], optimizer(whole.parameters())
        for _ in range(steps):
            theirs.zero_grad()
            losses.append(torch.zeros((), dtype=torch.float64))
            for part, goal in zip(inputs.chunk(chunks), target.chunk(chunks), strict=True):
                part_loss = loss_fn(whole(part), goal) / chunks
                part_loss.backward()
                losses[-1] += part_loss.detach()
            theirs.step()
        return _Unsplit(inputs, target, losses, whole.state_dict())

    def compare(
        name: str,
        schedule: Order,
        places: Callable[[int, int], int],
        chunks: int = 4,
        steps: int = 2,
        size: int = 8,
        optimizer: Optimizer = _sgd,
    ) -> None:
        both, whole = captured_once(name), unsplit(name, chunks, steps, size, optimizer)
        with logical_devices(3), both.flow() as flow:
            names = list(flow.layer_gpus)
            for index, layer in enumerate(names):
                flow.layer_gpus[layer] = places(index, len(names))
            flow.update_flow()
            step = flow.train_step(MODELS[name][2], optimizer(both.model.parameters()), schedule)
            losses = [step(whole.inputs, whole.target, chunks=chunks).cpu() for _ in range(steps)]
        for loss, expected in zip(losses, whole.losses, strict=True):
            torch.testing.assert_close(loss, expected, atol=1e-10, rtol=1e-10)
        for key, value in whole.state.items():
            torch.testing.assert_close(
                both.model.state_dict()[key].cpu(), value, atol=1e-9, rtol=1e-9, msg=key
            )

    return compare


def _in_order(index: int, count: int) -> int:
    return index * 3 // count


@pytest.mark.covering
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "name", ["residual", pytest.param("unet", marks=pytest.mark.exhaustive), "complex", "tied gpt"]
)
def test_two_steps_equal_the_unsplit_models_over_the_same_micro_batches(
    name: str, schedule: Order, compare: Compare
) -> None:
    compare(name, schedule, _in_order)


def test_a_device_may_hold_several_segments(compare: Compare) -> None:
    compare("unet", "1f1b", lambda index, _: index % 3)


def _in_rounds(index: int, count: int) -> int:
    return (index * 6 // count) % 3


def _and_back(index: int, count: int) -> int:
    return (0, 1, 2, 1, 0, 2)[index * 6 // count]


@pytest.mark.covering
@pytest.mark.parametrize("places", [_in_rounds, _and_back])
@pytest.mark.parametrize(
    ("name", "chunks"), [("unet", 4), ("tied gpt", 4), ("tied gpt", 8)]
)  # no whole rounds of 3
def test_interleaved_segments_train_as_the_unsplit_model(
    name: str, chunks: int, places: Callable[[int, int], int], compare: Compare
) -> None:
    compare(name, "interleaved", places, chunks=chunks)


@pytest.mark.covering(every=8, first=5)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["unet", "tied gpt"])
def test_interleaved_segments_whose_transfers_are_timed_train_as_the_unsplit_model(
    name: str, seed: int, compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins time nothing: here passes and transfers take times drawn at random, and their order
    follows them."""
    random = Random(seed)

    def crossings(stages: Sequence[TrainingStage], _: Sequence[int]) -> list[Transfer]:
        maker = {name: index for index, stage in enumerate(stages) for name in stage.writes}
        reads = {
            (maker[name], index)
            for index, stage in enumerate(stages)
            for name in stage.reads
            if name in maker
        }
        apart = [pair for pair in sorted(reads) if stages[pair[0]].device != stages[pair[1]].device]
        return [Transfer(*pair, 3 * random.random(), 3 * random.random()) for pair in apart]

    monkeypatch.setattr(
        TrainingStage, "pass_ms", lambda _: (random.random(), random.random(), random.random())
    )
    monkeypatch.setattr(training_pipeline, "crossings", crossings)
    compare(name, "interleaved", _and_back if seed % 2 else _in_rounds, chunks=6, size=12)


def test_interleaved_segments_have_room_for_as_many_micro_batches_as_their_placement_says() -> None:
    """Interleaving pays: with links this fast a segment is a layer, and others hold more than an
    order by itself."""
    solved = solve(row([1.0, 2.0, 1.0, 3.0, 1.0, 2.0], devices=2, chunks=5, schedule="interleaved"))
    assert solved.step is not None and len(solved.step.in_flight) > 2
    with logical_devices(2) as places:
        names = dict(zip(sorted(set(solved.layer_devices.values())), map(str, places), strict=True))
        where = {layer: names[device] for layer, device in solved.layer_devices.items()}
        model = nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in where)).double()
        flow = DataFlow(model)
        flow.update_flow(solved.model_copy(update={"layer_devices": where}))
        assert (flow.schedule, flow.in_flight) == ("interleaved", solved.step.in_flight)
        step = flow.train_step(functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
        step(torch.randn(10, 4, dtype=torch.float64), torch.randn(10, 4, dtype=torch.float64))
        assert step.pipelines[0].plan.in_flight == solved.step.in_flight
        assert [len(stage.slots) for stage in step.pipelines[0].stages] == list(
            solved.step.in_flight
        )
        flow.in_flight = [2, 0]
        with pytest.raises(
            InputError,
            match=r"flow.in_flight is \[2, 0\]: give a number of micro-batches, 1 or more",
        ):
            step(torch.randn(10, 4, dtype=torch.float64), torch.randn(10, 4, dtype=torch.float64))
        flow.undo()
    assert flow.in_flight == ()


def test_whole_rounds_of_micro_batches_go_in_megatrons_order_and_train_as_the_unsplit_model(
    compare: Compare,
) -> None:
    compare("tied gpt", "interleaved", _in_rounds, chunks=6, size=12)


def test_a_tied_weight_is_trained_once_though_two_devices_use_it(compare: Compare) -> None:
    compare(
        "tied gpt",
        "zero-bubble",
        _in_order,
        steps=4,
        optimizer=lambda weights: torch.optim.Adam(weights, lr=0.01),
    )


def test_one_micro_batch_and_as_many_as_samples_agree_with_the_unsplit_model(
    compare: Compare,
) -> None:
    compare("tied gpt", "zero-bubble", _in_order, chunks=1)
    compare("tied gpt", "1f1b", _in_order, chunks=8)


class _Branching(nn.Module):
    """A branch on a tensor's value: it cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.two(x if x.sum() > 0 else -x)


def _step_of(model: nn.Module, **options: Any) -> Any:
    flow = unverified(DataFlow(model, **options))  # the branch is by all samples
    flow.layer_gpus["two"] = 1
    flow.update_flow()
    return flow.train_step(functional.mse_loss)


def test_a_model_that_cannot_be_captured_trains_through_hooks() -> None:
    torch.manual_seed(0)
    model = _Branching().double()
    whole = copy.deepcopy(model)
    inputs, target = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    with logical_devices(2):
        step = _step_of(model)
        loss = step(inputs, target.to("cpu:0"), chunks=2)
    expected = torch.stack(
        [
            functional.mse_loss(whole(x), y) / 2
            for x, y in zip(inputs.chunk(2), target.chunk(2), strict=True)
        ]
    )
    expected.sum().backward()
    torch.testing.assert_close(loss.cpu(), expected.sum().detach())
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


def test_a_batch_that_does_not_divide_is_cut_into_fewer_equal_micro_batches() -> None:
    model = nn.Sequential(OrderedLinear(), nn.Linear(4, 2)).double()
    whole = copy.deepcopy(model)
    inputs, target = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus["1"] = 1
        flow.update_flow()
        loss = flow.train_step(functional.mse_loss)(inputs, target, chunks=4)
    functional.mse_loss(whole(inputs), target).backward()
    torch.testing.assert_close(loss.cpu(), functional.mse_loss(whole(inputs), target).detach())
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


class OrderedLinear(nn.Linear):
    """A linear layer of its own class."""

    def __init__(self) -> None:
        super().__init__(4, 4)


def test_the_running_statistics_are_not_touched_by_preparing_the_pipeline() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    inputs, target = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus["2"] = 1
        flow.update_flow()
        flow.train_step(functional.mse_loss)(inputs, target, chunks=2)
    assert model[1].num_batches_tracked.item() == 2  # type: ignore[operator,union-attr]


def test_a_loss_that_fails_leaves_the_model_as_it_was_and_the_next_step_right() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    whole = copy.deepcopy(model)
    inputs, target = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    fails = [True]

    def loss_fn(output: Tensor, goal: Tensor) -> Tensor:
        if fails.pop():
            raise RuntimeError("the loss fails")
        fails.append(False)
        return functional.mse_loss(output, goal)

    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus["2"] = 1
        flow.update_flow()
        step = flow.train_step(loss_fn)
        with pytest.raises(RuntimeError, match="the loss fails"):
            step(inputs, target, chunks=2)
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name].cpu(), value)
        fails.append(False)
        loss = step(inputs, target, chunks=2)
    expected = sum(
        functional.mse_loss(whole(x), y) / 2
        for x, y in zip(inputs.chunk(2), target.chunk(2), strict=True)
    )
    torch.testing.assert_close(loss.cpu(), expected.detach())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda flow: flow.undo(), "update_flow"),
        (lambda flow: flow.eval(), r"flow.train\(\)"),
    ],
)
def test_a_flow_that_cannot_train_says_what_to_do(
    spoil: Callable[[DataFlow], Any], words: str
) -> None:
    flow = DataFlow(nn.Sequential(nn.Linear(4, 2)))
    flow.update_flow()
    step = flow.train_step(functional.mse_loss)
    spoil(flow)
    with pytest.raises(InputError, match=words):
        step(torch.randn(2, 4), torch.randn(2, 2))


def test_clones_refuse_to_train() -> None:
    flow = DataFlow(nn.Sequential(nn.Linear(4, 2)), enable_clone=True)
    flow.update_flow()
    with pytest.raises(InputError, match="without enable_clone"):
        flow.train_step(functional.mse_loss)(torch.randn(2, 4), torch.randn(2, 2))


@pytest.mark.parametrize("chunks", [0, -1, 1.5])
def test_a_wrong_number_of_micro_batches_is_named(chunks: Any) -> None:
    flow = DataFlow(nn.Sequential(nn.Linear(4, 2)))
    flow.update_flow()
    with pytest.raises(InputError, match=f"chunks={chunks}"):
        flow.train_step(functional.mse_loss)(torch.randn(2, 4), torch.randn(2, 2), chunks=chunks)


def test_an_unknown_schedule_is_named() -> None:
    flow = DataFlow(nn.Sequential(nn.Linear(4, 2)))
    with pytest.raises(
        InputError, match="'gpipe' is not known; give one of fill-drain, 1f1b, zero-bubble"
    ):
        flow.train_step(functional.mse_loss, schedule="gpipe")  # type: ignore[arg-type]


def test_a_loss_that_is_no_function_is_named() -> None:
    with pytest.raises(InputError, match="loss_fn is 'mse'"):
        DataFlow(nn.Sequential(nn.Linear(4, 2))).train_step("mse")  # type: ignore[arg-type]


def test_a_loss_that_adds_samples_up_is_refused_with_the_way_out() -> None:
    flow = DataFlow(nn.Linear(4, 4), ["cpu:0", "cpu:1"])
    with pytest.raises(
        InputError, match=r"CrossEntropyLoss has reduction='sum'.*BatchOptions\(reduction='sum'\)"
    ):
        flow.train_step(nn.CrossEntropyLoss(reduction="sum"))
    flow.train_step(nn.KLDivLoss(reduction="batchmean"))


def test_recorded_steps_do_not_look_for_waiting_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at every parameter costs the host much of a step of a large model."""
    flow, looks = DataFlow(nn.Sequential(nn.Linear(4, 2))), []
    flow.update_flow()
    step = flow.train_step(functional.mse_loss)
    has_waiting = type(step)._has_waiting
    monkeypatch.setattr(
        type(step), "_has_waiting", lambda self, keep: looks.append(1) or has_waiting(self, keep)
    )
    for waits in (False, True, False, False):
        step(torch.randn(2, 4), torch.randn(2, 2), update=not waits)
    assert len(looks) == 1  # the first step records its passes


def test_a_target_of_another_size_than_the_batch_is_named() -> None:
    flow = DataFlow(nn.Sequential(nn.Linear(4, 2)))
    flow.update_flow()
    with pytest.raises(InputError, match=r"target of shape \(3, 2\) does not fit a batch of 2"):
        flow.train_step(functional.mse_loss)(torch.randn(2, 4), torch.randn(3, 2), chunks=2)


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (
            lambda output, target: (output - target).pow(2),
            r"loss_fn returned a tensor of shape \(2, 2\); return one",
        ),
        (lambda output, target: 0.0, "loss_fn returned 0.0; return one number"),
        # all of it was told
        (lambda output, target: {"loss": output}, "loss_fn returned a dict; return one number"),
        (
            lambda output, target: (output.detach() - target).pow(2).mean(),
            "there is nothing to train",
        ),
    ],
)
@pytest.mark.parametrize("captured", [True, False])
def test_a_loss_that_cannot_be_trained_on_is_named(
    loss_fn: Any, words: str, captured: bool
) -> None:
    flow = DataFlow(nn.Sequential(nn.Linear(4, 2)) if captured else _Branching())
    flow.update_flow()
    with pytest.raises(InputError, match=words):
        flow.train_step(loss_fn)(torch.randn(2, 4), torch.randn(2, 2))


@pytest.mark.parametrize("captured", [True, False])
def test_a_step_makes_gradients_though_none_are_made_around_it(captured: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 2)) if captured else _Branching()
    flow = DataFlow(model)
    flow.update_flow()
    with torch.no_grad():
        flow.train_step(functional.mse_loss)(torch.randn(2, 4), torch.randn(2, 2))
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.covering
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("frozen", [slice(0, 2), slice(2, 4), slice(4, 6)])
def test_a_device_all_of_whose_layers_are_frozen_trains_nothing_and_lets_gradients_through(
    frozen: slice, schedule: Order
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh()))
    ).double()
    model[frozen].requires_grad_(False)
    whole = copy.deepcopy(model)
    inputs = torch.randn(8, 4, dtype=torch.float64)
    with logical_devices(3):
        flow = DataFlow(model)
        for index, name in enumerate(flow.layer_gpus):
            flow.layer_gpus[name] = index // 2
        flow.update_flow()
        flow.train_step(functional.mse_loss, schedule=schedule)(inputs, inputs, chunks=4)
    functional.mse_loss(whole(inputs), inputs).backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad, atol=1e-10, rtol=1e-10)


def test_a_tied_weight_on_two_plain_cpu_stand_ins_has_the_gradients_of_both() -> None:
    # Stand-ins share memory outside logical_devices: each had an alias of the same weight, and the
    # last one's won.
    make, data, loss_fn = MODELS["tied gpt"]
    torch.manual_seed(0)
    model = make().double()
    whole = copy.deepcopy(model)
    inputs, target = data(8)
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    for index, layer in enumerate(flow.layer_gpus):
        flow.layer_gpus[layer] = index % 2
    flow.update_flow()
    flow.train_step(loss_fn)(inputs, target, chunks=2)
    loss_fn(whole(inputs), target).backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-10, rtol=1e-10)
