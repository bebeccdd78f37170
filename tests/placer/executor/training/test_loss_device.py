"""The loss runs on the device of the last layer, whichever way a model is run: so its own tensors
have one place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import TiedTokens
from torch import Tensor, nn
from torch.nn import functional

import placer
from placer import DataFlow, MixedDevicesError, StageError, devices
from placer.testing import logical_devices

X, Y = (
    torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4),
    torch.tensor([0, 1, 2, 2, 1, 0]),
)
FIRST, LAST, THIRD = (torch.device("cpu", index) for index in (0, 1, 2))

pytestmark = pytest.mark.filterwarnings("ignore:.*micro-batches run one after another")


class Plain(nn.Module):
    """Captured."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x))


class Branching(Plain):
    """Runs through hooks."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y if bool(y.sum() > -1e9) else -y


class Skipping(Branching):
    """Runs through hooks, and its result is made by an operation of its own, of tensors of both
    devices."""

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return y[:, :3] + self.b(y) if bool(y.sum() > -1e9) else y


class Counting(Plain):
    """Captured, and its micro-batches run one after another: a device changes a buffer that another
    one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return self.b(self.a(x) + self.count * 0) + self.count * 0


class Pair(Branching):
    """Runs through hooks, and returns tensors of both devices."""

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return {"hidden": y, "logits": self.b(y) if bool(y.sum() > -1e9) else y}


class PlainPair(Plain):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return {"hidden": y, "logits": self.b(y)}


def _placed(model: nn.Module, a: int = 0, b: int = 1, **options: Any) -> DataFlow:
    flow = DataFlow(model.double(), device_ids=["cpu:0", "cpu:1", "cpu:2"], **options)
    flow.layer_gpus.update(a=a, b=b)
    flow.update_flow()
    return flow


def _logits(output: Any) -> Tensor:
    logits: Tensor = output["logits"] if isinstance(output, dict) else output
    return logits


def _loss(weight: Tensor, seen: list[Any], extra: Callable[[], Tensor] | None = None) -> Any:
    """A loss with a tensor of its own, which notes where what it is given is."""

    def loss(output: Any, target: Tensor) -> Tensor:
        tensors = [*output.values()] if isinstance(output, dict) else [output]
        seen.extend(devices.location(tensor) for tensor in (*tensors, target))
        result = functional.cross_entropy(_logits(output), target, weight=weight)
        return result if extra is None else result + extra()

    return loss


@pytest.mark.covering
@pytest.mark.parametrize("output_device", [None, "cpu:2"])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(
    "way", ["step", "hooked parameter", "penalty", "recompute", "applied", "autocast"]
)
@pytest.mark.parametrize("make", [Plain, Branching, Skipping, Counting, PlainPair, Pair])
def test_it_runs_where_the_last_layer_does(
    make: type[Plain], way: str, chunks: int, output_device: str | None
) -> None:
    torch.manual_seed(0)
    model = make().double()
    whole = copy.deepcopy(model)
    penalty = (
        (lambda module: lambda: module.b.bias.square().sum())
        if way == "penalty"
        else lambda module: None
    )
    # a mean by weights: by micro-batch
    parts = zip(X.chunk(chunks), Y.chunk(chunks), strict=True)
    expected = (
        sum(_loss(torch.ones(3).double(), [], penalty(whole))(whole(x), y) for x, y in parts)
        / chunks
    )
    expected.backward()
    seen: list[Any] = []
    with logical_devices(3):
        flow = _placed(model, output_device=output_device)
        weight = torch.ones(3, dtype=torch.float64, device=LAST)
        if way == "hooked parameter":
            model.a.weight.register_hook(lambda gradient: gradient)
        if way == "recompute":
            flow.recompute = ["cpu:1"]
        step = flow.train_step(_loss(weight, seen, penalty(model)))
        if way == "applied":
            with flow.applied():
                result = step(X, Y, chunks=chunks)
        elif way == "autocast":
            with torch.autocast("cpu", enabled=False):
                result = step(X, Y, chunks=chunks)
        else:
            result = step(X, Y, chunks=chunks)
        assert {str(place) for place in seen} == {"cpu:1"}
        assert devices.location(result) == LAST
    torch.testing.assert_close(result.cpu(), expected.detach(), atol=1e-12, rtol=1e-12)
    for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), its.grad, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("make", [Plain, Branching, Counting])
def test_it_follows_the_last_layer_to_the_device_of_the_results(make: type[Plain]) -> None:
    seen: list[Any] = []
    with logical_devices(3):
        flow = _placed(make(), a=1, b=0)
        flow.train_step(_loss(torch.ones(3, dtype=torch.float64, device=FIRST), seen))(
            X, Y, chunks=2
        )
        flow.layer_gpus["b"] = 2
        flow.update_flow()
        flow.train_step(_loss(torch.ones(3, dtype=torch.float64, device=THIRD), seen))(
            X, Y, chunks=2
        )
    assert list(dict.fromkeys(map(str, seen))) == ["cpu:0", "cpu:2"]


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("make", [Plain, Branching, Counting])
def test_results_of_a_call_are_still_on_the_output_device(make: type[Plain]) -> None:
    with logical_devices(3):
        flow = _placed(make(), output_device="cpu:2")
        flow.train_step(lambda output, target: functional.cross_entropy(output, target))(
            X, Y, chunks=2
        )
        assert devices.location(flow(X)) == devices.location(flow(X, chunks=2)) == THIRD
        assert {devices.location(y) for y in flow.eval().stream([X, X])} == {THIRD}


def test_a_measured_step_runs_it_there_too() -> None:
    seen: list[Any] = []
    with logical_devices(3):
        flow = _placed(Plain(), output_device="cpu:2")
        step = flow.train_step(_loss(torch.ones(3, dtype=torch.float64, device=LAST), seen))
        flow.measure(X, Y, step=step, chunks=2)
    assert {str(place) for place in seen} == {"cpu:1"}


def test_a_refinement_times_it_there_too() -> None:
    seen: list[Any] = []
    with logical_devices(2):
        weight = torch.ones(3, dtype=torch.float64, device=LAST)
        places = {"a": "cpu:0", "b": "cpu:1"}
        model, given = Plain().double(), ["cpu:0", "cpu:1"]
        profile = placer.profile(model, X, given, training=True, progress=False, repeats=1)
        request = placer.PlacementRequest(
            profile=profile, constraints=placer.Constraints(pinned=places)
        )
        loss = _loss(weight, seen)
        placer.refine(
            placer.solve(request),
            model,
            X,
            request=request,
            loss_fn=loss,
            target=Y,
            rounds=1,
            repeats=1,
        )
    assert {str(place) for place in seen} == {"cpu:1"}


@pytest.mark.parametrize("make", [Plain, Branching])
def test_an_error_of_the_loss_names_its_device(make: type[Plain]) -> None:
    def failing(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("no loss")

    with logical_devices(3):
        flow = _placed(make())
        with pytest.raises(StageError, match=r"on cpu:1, layer '\(loss\)'.*no loss") as told:
            flow.train_step(failing)(X, Y)
        assert (told.value.device, told.value.layer) == ("cpu:1", "(loss)")
        elsewhere = torch.ones(3, dtype=torch.float64, device=FIRST)
        with pytest.raises(MixedDevicesError) as mixed:
            flow.train_step(_loss(elsewhere, []))(X, Y)
        assert any("on cpu:1, layer '(loss)'" in note for note in mixed.value.__notes__)


def test_of_tied_weights_the_last_layer_counts_and_not_the_owner() -> None:
    tokens, seen = torch.tensor([[1, 2], [0, 6]]), []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(devices.location(output))
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    with logical_devices(2):
        flow = DataFlow(TiedTokens().double(), device_ids=["cpu:0", "cpu:1"])
        flow.layer_gpus.update(embedding=0, mix=0, head=1)
        flow.update_flow()
        flow.train_step(loss)(tokens, tokens, chunks=2)
    assert set(map(str, seen)) == {"cpu:1"}
