"""What a model takes and returns, in every container."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from splitting import assert_same, assert_split_equals_unsplit, scatter_layers, step, twins
from torch import Tensor, nn

from placer import DataFlow
from placer.errors import InputError, StageError
from placer.testing import logical_devices

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None
    name: str = "output"


class Cache:
    """What a user might hand from call to call: no container that torch knows."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.length = 0

    def append(self, key: Tensor) -> Cache:
        self.keys.append(key)
        self.length += 1
        return self


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x))
        return hidden, self.second(hidden)


class ReturnsTuple(_Model):
    def forward(self, x: Tensor) -> Any:
        return self.run(x)


class ReturnsList(_Model):
    def forward(self, x: Tensor) -> Any:
        return list(self.run(x))


class ReturnsDict(_Model):
    def forward(self, x: Tensor) -> Any:
        hidden, y = self.run(x)
        return {"y": y, "hidden": hidden, "none": None}


class ReturnsOrderedDict(_Model):
    def forward(self, x: Tensor) -> Any:
        hidden, y = self.run(x)
        return OrderedDict(out=y, aux=hidden)


class ReturnsNestedDict(_Model):
    def forward(self, x: Tensor) -> Any:
        hidden, y = self.run(x)
        return {"heads": {"main": [y, {"again": y * 2}]}, "layers": (hidden, None, "text", 3)}


class ReturnsNamedTuple(_Model):
    def forward(self, x: Tensor) -> Any:
        return Pair(self.run(x)[1], None)


class ReturnsDataclass(_Model):
    def forward(self, x: Tensor) -> Any:
        hidden, y = self.run(x)
        return Output(y, (hidden, x))


class ReturnsCache(_Model):
    def forward(self, x: Tensor) -> Any:
        hidden, y = self.run(x)
        return Cache().append(hidden).append(y)


class ReturnsItsInput(_Model):
    def forward(self, x: Tensor) -> Any:
        return self.run(x)[1], x


class ReturnsAParameter(_Model):
    def forward(self, x: Tensor) -> Any:
        return self.run(x)[1], self.first.weight


class ReturnsABuffer(_Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Any:
        return self.run(x)[1] * self.scale, self.scale


class ReturnsANumber(_Model):
    def forward(self, x: Tensor) -> Any:
        return self.run(x)[1], x.shape[0], 1.5


class ReturnsOneTensorTwice(_Model):
    def forward(self, x: Tensor) -> Any:
        y = self.run(x)[1]
        return y, y


class ReturnsATensorOfAllTheBatch(_Model):
    def forward(self, x: Tensor) -> Any:
        return self.run(x)[1].mean()


RETURNING = [
    ReturnsTuple,
    ReturnsList,
    ReturnsDict,
    ReturnsOrderedDict,
    ReturnsNestedDict,
    ReturnsNamedTuple,
    ReturnsDataclass,
    ReturnsCache,
    ReturnsItsInput,
    ReturnsAParameter,
    ReturnsABuffer,
    ReturnsANumber,
    ReturnsOneTensorTwice,
    ReturnsATensorOfAllTheBatch,
]


@pytest.mark.covering
@pytest.mark.parametrize("model", RETURNING)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_every_kind_of_output_comes_back_as_the_model_returns_it(
    model: type[nn.Module], training: bool
) -> None:
    assert_split_equals_unsplit(model, (X,), training=training)


class TakesTuple(_Model):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.run(pair[0])[1] + pair[1]


class TakesDict(_Model):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.run(batch["x"])[1] * batch["mask"]


class TakesNamedTuple(_Model):
    def forward(self, pair: Pair) -> Tensor:
        return self.run(pair.left)[1] if pair.right is None else self.run(pair.right)[1]


class TakesDataclass(_Model):
    def forward(self, given: Output) -> Tensor:
        y = self.run(given.logits)[1]
        return y if given.hidden is None else y + given.hidden[0]


class TakesCache(_Model):
    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        hidden, y = self.run(x)
        cache = (cache or Cache()).append(hidden)
        return y + sum(cache.keys), cache


class TakesKeywords(_Model):
    def forward(
        self, x: Tensor, scale: float = 1.0, *, mask: Tensor | None = None, flag: bool = False
    ) -> Tensor:
        y = self.run(x)[1] * scale
        y = y if mask is None else y * mask
        return -y if flag else y


def _cache() -> Cache:
    return Cache().append(X.clone()).append(X + 1)


TAKING: dict[str, tuple[type[nn.Module], Any, Any]] = {
    "tuple": (TakesTuple, ((X, X + 1),), {}),
    "dict": (TakesDict, ({"x": X, "mask": X > 0},), {}),
    "namedtuple": (TakesNamedTuple, (Pair(X, None),), {}),
    "namedtuple_full": (TakesNamedTuple, (Pair(X, X + 1),), {}),
    "dataclass": (TakesDataclass, (Output(X, (X + 2,)),), {}),
    "dataclass_none": (TakesDataclass, (Output(X),), {}),
    "none": (TakesCache, (X, None), {}),
    "keywords": (TakesKeywords, (X,), {"mask": X > 0, "scale": 2.0, "flag": True}),
    "only_keywords": (TakesKeywords, (), {"x": X}),
    "constants": (TakesKeywords, (X, 3.0), {}),
}


@pytest.mark.parametrize("name", TAKING)
def test_every_kind_of_input_reaches_the_model(name: str) -> None:
    model, args, kwargs = TAKING[name]
    assert_split_equals_unsplit(model, args, kwargs)


def test_a_cache_object_is_handed_from_call_to_call() -> None:
    model, reference = twins(TakesCache, training=False)
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        _, cache = flow(X)
        y, cache = flow(X, cache=cache)
    _, expected_cache = reference(X)
    expected, expected_cache = reference(X, cache=expected_cache)
    assert type(cache) is Cache
    assert cache.length == expected_cache.length == 2
    torch.testing.assert_close(y.detach(), expected.detach())


def test_other_constants_among_the_inputs_are_another_capture() -> None:
    model, reference = twins(TakesKeywords)
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        for scale, flag in ((1.0, False), (2.0, False), (2.0, True), (1.0, False)):
            assert_same(
                step(flow, model, (X, scale), {"flag": flag}),
                step(reference, reference, (X, scale), {"flag": flag}),
            )


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.last(torch.relu(self.first(x)) - y)
        return result


def test_one_tensor_may_be_given_twice_and_two_another_time() -> None:
    model, whole = twins(_Two, training=False)
    other = X.flip(0)
    pairs = [(X, X), (X, other), (other, other), (other, X)]
    expected = [whole(*given).detach() for given in pairs]
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    flow.layer_gpus.update(first=0, last=1)
    flow.update_flow()
    torch.testing.assert_close([flow(*given).detach() for given in pairs], expected)
    torch.testing.assert_close(list(flow.stream(pairs)), expected)


def test_a_gradient_flows_back_to_an_input() -> None:
    model, reference = twins(ReturnsTuple)
    ours, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
    with logical_devices(3):
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        step(flow, model, (ours,), {})
    step(reference, reference, (theirs,), {})
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_outputs_are_on_the_output_device() -> None:
    with logical_devices(3):
        flow = DataFlow(ReturnsNestedDict().double(), output_device="cpu:2")
        flow.layer_gpus["first"] = 1
        flow.layer_gpus["second"] = 0
        flow.update_flow()
        result = flow(X)
        places = {tensor.device for tensor in (result["heads"]["main"][0], result["layers"][0])}
        assert places == {torch.device("cpu:2")}


class _OfADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layer(batch["x"])


class _Lazy(nn.Module):
    """Its layers would run when the caller iterates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return {"each": (layer(x) for layer in (self.first, self.second))}


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_generator_as_output_is_refused(chunks: int) -> None:
    # the capture kept the generator of its own tracing
    flow = DataFlow(_Lazy(), ["cpu:0", "cpu:1"])
    flow.update_flow()
    with pytest.raises(InputError, match=r"returns a generator.*return a list"):
        flow(torch.randn(4, 4), chunks=chunks)


@pytest.mark.parametrize("way", ["step", "stream"])
def test_a_dict_that_is_itself_the_argument_is_told_how_to_be_given(way: str) -> None:
    flow = DataFlow(_OfADict(), ["cpu:0", "cpu:1"])
    flow.update_flow()
    batch, target = {"x": torch.randn(2, 4)}, torch.randn(2, 2)
    with pytest.raises((TypeError, StageError)) as caught:
        flow.train_step(nn.MSELoss())(batch, target) if way == "step" else list(
            flow.stream([batch])
        )
    told = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "if the model takes a dict itself, give it as (inputs,)" in told
    assert flow.train_step(nn.MSELoss())((batch,), target) > 0


def test_nested_tensors_without_sizes_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    rows = [torch.randn(3, 4), torch.randn(2, 4)]
    nested = torch.nested.nested_tensor(rows, layout=torch.strided)
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with torch.no_grad():
        expected = [model(row) for row in rows]
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update({"0": 0, "1": 1})
        flow.update_flow()
        step = flow.train_step(lambda output, _: output.sum())
        with pytest.raises(InputError, match=r"torch\.jagged"):
            flow(nested)
        with pytest.raises(InputError, match=r"torch\.jagged"):
            step(torch.randn(2, 4), nested, chunks=2)
        with torch.no_grad():
            for found, want in zip(flow(jagged).unbind(), expected, strict=True):
                torch.testing.assert_close(found.cpu(), want)
