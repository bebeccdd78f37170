"""Segments under torch.compile train as the unsplit model; what cannot be compiled runs as it is,
and says why."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

from placer import DataFlow
from placer.errors import InputError
from placer.executor.training.stages import compiled_stages
from placer.executor.training.stages.split_segments import OpenedSegment
from placer.executor.training.train_step import TrainStep
from placer.executor.training.training_pipeline import Order
from placer.testing import logical_devices

CHUNKS = 4


class _Model(nn.Module):
    """A skip from device to device, running statistics, a write in place, and several layers a
    segment."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.act = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU()
        self.blur, self.relu = nn.Conv1d(1, 2, 3, padding=1), nn.ReLU(inplace=True)
        self.middle, self.tanh = nn.Linear(8, 8), nn.Tanh()
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.first(x)))
        y = self.relu(self.blur(y[:, None])).sum(1)
        result: Tensor = self.last(self.tanh(self.middle(y)) + y)
        return result


def _batch(size: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(size, 4, dtype=torch.float64), torch.randn(size, 2, dtype=torch.float64)


def _flow(model: nn.Module, **options: Any) -> DataFlow:
    flow = DataFlow(model, ["cpu:0", "cpu:1"], **options)
    for index, name in enumerate(flow.layer_gpus):
        flow.layer_gpus[name] = index * 2 // len(flow.layer_gpus)
    flow.update_flow()
    return flow


def _train(schedule: Order, backend: Any, size: int = 8, **options: Any) -> TrainStep:
    """Two steps, compared with the unsplit model's over the same micro-batches."""
    torch.manual_seed(0)
    model = _Model().double()
    whole = copy.deepcopy(model)
    ours, theirs = (
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, whole)
    )
    inputs, target = _batch(size)
    flow = _flow(model)
    for name, value in options.items():
        setattr(flow, name, value)
    step = flow.train_step(functional.mse_loss, ours, schedule, compile=backend)
    losses = [step(inputs, target, chunks=CHUNKS) for _ in range(2)]
    parts = -(-size // CHUNKS)
    for loss in losses:
        theirs.zero_grad()
        expected = torch.zeros((), dtype=torch.float64)
        for part, goal in zip(inputs.split(parts), target.split(parts), strict=True):
            part_loss = functional.mse_loss(whole(part), goal) * (len(part) / size)
            part_loss.backward()
            expected += part_loss.detach()
        theirs.step()
        torch.testing.assert_close(loss, expected, atol=1e-10, rtol=1e-10)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(
            model.state_dict()[name], value, atol=1e-10, rtol=1e-10, msg=name
        )
    return step


@pytest.mark.exhaustive
def test_every_segment_is_compiled_for_its_own_shapes_alone() -> None:
    """Torch tells functions apart by file and line, and takes sizes that differ between two of them
    for variable."""
    variable = []

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        variable.append([given for given in inputs if isinstance(given, torch.SymInt)])
        return graph.forward

    for size in (8, 12, 16):
        _train("zero-bubble", backend, size)
    assert len(variable) >= 6
    assert not any(variable)


@pytest.fixture
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trial takes half the time of the one before it."""
    times = (2.0**-trial for trial in itertools.count())
    trial = compiled_stages._trial_ms

    def faster(stage: Any) -> float:
        trial(stage)
        return next(times)

    monkeypatch.setattr(compiled_stages, "_trial_ms", faster)


@pytest.mark.covering(every=4, first=3)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("size", [8, 11])
@pytest.mark.usefixtures("always_faster")
def test_compiled_segments_train_as_the_unsplit_model_and_weight_gradients_come_later(
    schedule: Order, size: int
) -> None:
    step = _train(schedule, "aot_eager", size)
    assert step.not_compiled_because == {}
    assert list(step.compiled) == ["segment 0 of 2 on cpu:0", "segment 1 of 2 on cpu:1"]
    assert step.compiled["segment 0 of 2 on cpu:0"] == "0.5 ms forwards and backwards, 1 ms without"
    # a pass of their own under zero-bubble alone
    for stage in step.pipelines[0].stages:
        assert (
            stage.split is isinstance(stage.segment, OpenedSegment) is (schedule == "zero-bubble")
        )
    if schedule == "zero-bubble":
        deferred = _deferred(step)
        assert sorted(deferred, key=str) == ["blur", "first", "last", "middle"]


def _deferred(step: TrainStep) -> list[Any]:
    """Return the layers whose weight gradients the backward passes leave for later."""
    found = []
    for stage in step.pipelines[0].stages:
        slot = stage.slots[0]
        slot.passes["forward"]()
        slot.passes["backward"]()
        found += [addition.layer for addition in slot.deferred]
        slot.passes["weights"]()
        assert not slot.deferred
    return found


class _Images(nn.Module):
    """Convolutions on both sides of the border."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Conv2d(2, 4, 3),
            nn.Conv2d(4, 4, 3),
            nn.Conv2d(4, 2, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.third(torch.relu(self.second(torch.relu(self.first(x)))))
        return result


@pytest.mark.usefixtures("always_faster")
def test_a_compiler_may_choose_the_layout_of_products_and_not_of_what_is_sent() -> None:
    def chosen(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        def run(*given: Any) -> list[Any]:
            made = graph(*given)
            images = [isinstance(one, Tensor) and one.dim() == 4 for one in made]
            return [
                one.contiguous(memory_format=torch.channels_last) if image else one
                for one, image in zip(made, images, strict=True)
            ]

        return make_boxed_func(run)

    torch.manual_seed(0)
    model = _Images().double()
    whole = copy.deepcopy(model)
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    flow.layer_gpus.update(first=0, second=0, third=1)
    flow.update_flow()
    x, target = (
        torch.randn(8, 2, 12, 12, dtype=torch.float64),
        torch.randn(8, 2, 6, 6, dtype=torch.float64),
    )
    backend = aot_autograd(fw_compiler=chosen)
    step = flow.train_step(functional.mse_loss, None, "zero-bubble", compile=backend)
    for _ in range(2):  # the first batch is compared before its passes are made
        loss = step(x, target, chunks=2)
    expected = functional.mse_loss(whole(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    first = step.pipelines[0].stages[0]
    slot = first.slots[0]
    slot.passes["forward"]()
    slot.passes["backward"]()
    assert all(made.is_contiguous() for made in slot.outputs.values())
    given = [addition.x for addition in slot.deferred if addition.x.shape[1] == 4]
    assert given and all(x.is_contiguous(memory_format=torch.channels_last) for x in given)
    slot.passes["weights"]()


@pytest.mark.usefixtures("always_faster")
def test_what_cannot_be_compiled_so_has_whole_backward_passes_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*given: Any) -> OpenedSegment:
        raise NotImplementedError("no openings")

    monkeypatch.setattr(OpenedSegment, "from_segment", refused)
    step = _train("zero-bubble", "aot_eager")
    assert step.not_compiled_because == {}
    told = "backward passes are whole: NotImplementedError: no openings"
    assert all(told in gain for gain in step.compiled.values()) and len(step.compiled) == 2
    assert not any(stage.split for stage in step.pipelines[0].stages)


class _Aside(nn.Module):
    """A layer's own result and a value for another stage; the loss depends on neither."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lost, self.last, self.aside = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, z = self.first(x), self.lost(x)
        return self.last(y), self.aside(y) + z


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.usefixtures("always_faster")
def test_what_the_loss_does_not_depend_on_has_no_gradient_compiled_either(schedule: Order) -> None:
    model = _Aside()
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    flow.layer_gpus.update(first=0, lost=0, last=1, aside=1)
    flow.update_flow()
    step = flow.train_step(
        lambda made, goal: functional.mse_loss(made[0], goal), None, schedule, compile="aot_eager"
    )
    for _ in range(2):  # the first batch is compared before its passes are made
        step(torch.randn(8, 4), torch.randn(8, 4), chunks=CHUNKS)
    assert len(step.compiled) == 2
    reached = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert reached == {"first.weight", "first.bias", "last.weight", "last.bias"}


class _Regions(nn.Module):
    """As rotary embeddings are: a part without gradients, and one that does not cast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            scale = x.abs().mean()
        result: Tensor = self.last(torch.tanh(self.first(x) * scale))
        return result


@pytest.mark.covering(every=2, first=1)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.usefixtures("always_faster")
def test_regions_without_gradients_or_casts_are_part_of_one_graph(schedule: Order) -> None:
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(_Regions(), nn.Linear(4, 4)).double()
    whole = copy.deepcopy(model)
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    flow.layer_gpus.update({"0": 0, "1": 1})
    flow.update_flow()
    step = flow.train_step(functional.mse_loss, None, schedule, compile=backend)
    inputs, target = (torch.randn(8, 4, dtype=torch.float64) for _ in range(2))
    step(inputs, target, chunks=1)
    functional.mse_loss(whole(inputs), target).backward()
    assert len(step.compiled) == 2 and not step.not_compiled_because
    assert len(graphs) == 3  # two segments, and the loss
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.usefixtures("always_faster")
def test_under_autocast_compiled_segments_have_whole_backward_passes() -> None:
    model, whole = (copy.deepcopy(made).float() for made in [_Model()] * 2)
    inputs, target = (tensor.float() for tensor in _batch())
    step = _flow(model).train_step(functional.mse_loss, None, "zero-bubble", compile="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        step(inputs, target, chunks=1)
        expected = functional.mse_loss(whole(inputs), target)
    expected.backward()
    assert step.compiled and not any(stage.split for stage in step.pipelines[0].stages)
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-2, rtol=1e-2)


@pytest.mark.usefixtures("always_faster")
def test_the_loss_is_compiled_with_the_last_segment() -> None:
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    step = _train("zero-bubble", backend)
    first, last = step.compiled.values()
    assert (
        "loss" not in first
        and "; the loss too: 0.0625 ms forwards and backwards, 0.125 ms without" in last
    )
    assert any("mse_loss" in str(node.target) for graph in graphs for node in graph.graph.nodes)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(
    ("times", "told"), [([1, 2, 1, 2, 0.5], "the loss alone: 0.5"), ([2, 1, 2, 1, 3], "")]
)
def test_the_loss_is_compiled_where_that_is_faster_whatever_its_segment(
    times: list[float], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(times)
    monkeypatch.setattr(compiled_stages, "_trial_ms", lambda stage: float(next(left)))
    step = _train("zero-bubble", "aot_eager")
    last = step.compiled["segment 1 of 2 on cpu:1"]
    assert told in last and ("loss" in last) is bool(told)


@pytest.mark.usefixtures("always_faster")
def test_a_loss_that_cannot_be_compiled_stays_as_it_is_and_says_why() -> None:
    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        if any("mse_loss" in str(node.target) for node in graph.graph.nodes):
            raise NotImplementedError("no such loss")
        return graph.forward

    step = _train("zero-bubble", backend)
    assert "the loss is not: " in step.compiled["segment 1 of 2 on cpu:1"]
    assert "no such loss" in step.compiled["segment 1 of 2 on cpu:1"]


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("after_ms", [2.0, 1.0, 0.996])
def test_a_segment_that_gains_nothing_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch, after_ms: float
) -> None:
    times = iter([1.0, after_ms, 1.0, after_ms, after_ms])
    monkeypatch.setattr(compiled_stages, "_trial_ms", lambda stage: next(times))
    step = _train("1f1b", "aot_eager")
    assert step.compiled == {}
    why = f"it is no faster: {after_ms:.3g} ms forwards and backwards, 1 ms without"
    assert set(step.not_compiled_because.values()) == {why}


def test_a_compiler_that_fails_leaves_the_segments_as_they_were_and_says_why() -> None:
    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        raise NotImplementedError("no such operation")

    step = _train("zero-bubble", backend)
    assert step.compiled == {}
    reasons = set(step.not_compiled_because.values())
    assert len(reasons) == 1 and "no such operation" in reasons.pop()


@pytest.mark.parametrize(
    ("compile", "told"),
    [
        (
            "inducter",
            r"compile='inducter' is not a backend of torch.compile; "
            r"give one of .*aot_eager.*inductor",
        ),
        ("", "compile='' is not a backend"),
        (2, "compile=2: give True, False, a hashable function, or the name of a backend"),
    ],
)
def test_what_is_no_backend_is_named_at_once_with_those_that_are(compile: Any, told: str) -> None:
    flow = _flow(_Model())
    with pytest.raises(InputError, match=told):
        flow.train_step(functional.mse_loss, compile=compile)


def test_without_being_asked_nothing_is_compiled() -> None:
    step = _train("1f1b", False)
    assert step.compiled == {} and step.not_compiled_because == {}


def test_what_recomputes_is_not_compiled_and_says_so() -> None:
    step = _train("1f1b", "aot_eager", recompute=[0, 1])
    assert set(step.not_compiled_because.values()) == {"it recomputes"}


def test_under_logical_devices_segments_run_as_they_are_and_say_so() -> None:
    with logical_devices(2):
        flow = DataFlow(nn.Sequential(nn.Linear(4, 2)))
        flow.update_flow()
        step = flow.train_step(functional.mse_loss, compile=True)
        step(torch.randn(4, 4), torch.randn(4, 2))
    assert step.not_compiled_because == {
        "segment 0 of 1 on cpu:0": "logical_devices looks at every operation"
    }
