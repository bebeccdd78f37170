"""What forward leaves in what it is given, in a cache or a tensor, the caller finds there, as of
the unsplit model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from counted_captures import count_captures
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from placer import DataFlow
from placer.capture.pytrees import flatten
from placer.testing import logical_devices


class Cache:
    """Empty at first; layers put tensors into it, and count."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.seen = 0
        self.latest: dict[str, Tensor] = {}

    def add(self, place: int, key: Tensor) -> Tensor:
        if place == len(self.keys):
            self.keys.append(key)
        else:
            self.keys[place] = torch.cat([self.keys[place], key], 1)
        self.seen += key.shape[1]
        self.latest["key"] = key
        return self.keys[place].sum(1, keepdim=True)


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


class Decodes(_Base):
    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        x = self.first(x)
        return self.second(x + cache.add(0, x)) + cache.add(1, x)


class WritesToATensor(_Base):
    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        x = self.first(x)
        kept[:, 1] = x[:, 0]
        return self.second(kept + x)


class WorksInPlace(_Base):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)[:, 0] = 1.0
        return self.second(self.first(x).relu_())


class Nests(_Base):
    def forward(self, x: Tensor, nest: dict[str, Any]) -> Tensor:
        x = self.first(x)
        nest.pop("gone", None)
        nest["list"][0] = (nest["list"][0][0] + x, "word")
        nest["list"].append(x)
        nest["new"] = 3
        return self.second(x)


def _x() -> Tensor:
    return torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(6, 2, 4)


CASES: dict[str, tuple[type[_Base], Callable[[], tuple[Any, ...]]]] = {
    "an object": (Decodes, lambda: (_x(), Cache())),
    "a tensor": (WritesToATensor, lambda: (_x(), torch.zeros(6, 2, 4, dtype=torch.float64))),
    "the first input": (WorksInPlace, lambda: (_x(),)),
    "a nest": (Nests, lambda: (_x(), {"list": [(_x(), 1)], "gone": _x(), "same": _x()})),
}


def _hook(module: nn.Module, args: Any, result: Any) -> None:
    """A graph would not run it."""


@pytest.mark.covering
@pytest.mark.parametrize(("kind", "chunks"), [("captured", 1), ("captured", 2), ("hooked", 1)])
@pytest.mark.parametrize("name", CASES)
def test_the_caller_finds_what_the_unsplit_model_leaves(name: str, kind: str, chunks: int) -> None:
    make, given = CASES[name]
    model = make().double().eval()
    theirs = given()
    with torch.no_grad():
        expected = [model(*theirs), model(_x(), *theirs[1:])]
    if kind == "hooked":
        model.first.register_forward_hook(_hook)
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model)
        flow.layer_gpus.update({"first": 0, "second": 1})
        flow.update_flow()
        ours = given()
        before = ours[1:]
        results = [flow(*ours, chunks=chunks), flow(_x(), *ours[1:], chunks=chunks)]
        assert all(now is was for now, was in zip(ours[1:], before, strict=True))
        results, found = tree_map_only(Tensor, Tensor.cpu, (results, flatten(ours)[0]))
        nested = flatten(ours)[1].key
        assert ("hooks" in flow.not_captured_because) == (kind == "hooked"), (
            flow.not_captured_because
        )
    torch.testing.assert_close((results, found), (expected, flatten(theirs)[0]))
    assert nested == flatten(theirs)[1].key


def test_an_empty_cache_for_each_call_has_the_model_captured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = count_captures(monkeypatch)
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(Decodes().double().eval())
        flow.update_flow()
        for _ in range(3):
            cache = Cache()
            flow(_x(), cache)
            assert cache.seen == 4 and len(cache.keys) == 2
    assert len(made) == 1


def test_a_training_step_leaves_nothing_in_its_inputs_and_gives_the_same_gradients() -> None:
    model = WorksInPlace().double()
    x, target = _x(), torch.zeros(6, 2, 4, dtype=torch.float64)
    nn.functional.mse_loss(model(x.clone()), target).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update({"first": 0, "second": 1})
        flow.update_flow()
        flow.train_step(nn.functional.mse_loss)(x, target, chunks=2)
        assert (flow.not_captured_because, x.tolist()) == ("", _x().tolist())
        found = [
            None if parameter.grad is None else parameter.grad.cpu()
            for parameter in model.parameters()
        ]
    torch.testing.assert_close(found, expected)


class Single:
    """There is one of it."""

    def __init__(self) -> None:
        self.factor = 2.0

    def __copy__(self) -> Single:
        return self


class Whole:
    """It refuses to be copied."""

    def __init__(self) -> None:
        self.factor = 2.0

    def __reduce_ex__(self, version: Any) -> Any:
        raise TypeError("no")


class Scales(_Base):
    def forward(self, x: Tensor, by: Any) -> Tensor:
        result: Tensor = self.second(self.first(x)) * by.factor
        return result


@pytest.mark.parametrize("given", [Single(), Whole()], ids=["single", "whole"])
def test_what_allows_no_copy_is_given_as_it_is(given: Any) -> None:
    model = Scales().double()
    expected = model(_x(), given)
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update({"first": 0, "second": 1})
        flow.update_flow()
        torch.testing.assert_close(flow(_x(), given).cpu(), expected)
    assert given.factor == 2.0


class Sums(_Base):
    """A part of a model: what it is given was just made, and goes on."""

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        x.mul_(2)
        kept.copy_(self.first(x))
        return self.second(x)


@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_go_through_what_was_written_to(hooked: bool) -> None:
    model = Sums().double()

    def losses(forward: Callable[..., Tensor]) -> Tensor:
        scale = torch.full((), 1.5, dtype=torch.float64, requires_grad=True)
        x, kept = _x() * scale, torch.zeros_like(_x())
        y = forward(x, kept)
        (y.sum() + kept.pow(2).sum() + (x * x).sum()).backward()
        assert scale.grad is not None
        return torch.cat(
            [
                scale.grad.flatten(),
                *(p.grad.flatten() for p in model.parameters() if p.grad is not None),
            ]
        )

    expected = losses(model)
    model.zero_grad(set_to_none=True)
    if hooked:
        model.first.register_forward_hook(_hook)
    flow = DataFlow(model, device_ids=["cpu:0", "cpu:1"])
    flow.layer_gpus.update({"first": 0, "second": 1})
    flow.update_flow()
    torch.testing.assert_close(losses(flow), expected)


class WritesInside(_Base):
    """A layer writes to a tensor of the caller's, which is on another device then."""

    class _Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
            cache["k"][:, 0] = self.linear(x)[:, 0]
            return x + cache["k"]

    def __init__(self) -> None:
        super().__init__()
        self.second = self._Layer()

    def forward(self, x: Tensor, cache: dict[str, Tensor], again: dict[str, Tensor]) -> Tensor:
        assert again is cache
        y: Tensor = self.second(self.first(x), cache)
        return y


@pytest.mark.parametrize("hooked", [False, True])
def test_a_layer_that_writes_to_a_tensor_on_another_device_is_seen_by_the_caller(
    hooked: bool,
) -> None:
    model = WritesInside().double()
    cache = {"k": torch.zeros_like(_x())}
    with torch.no_grad():
        expected = model(_x(), cache, cache)
    if hooked:
        model.first.register_forward_hook(_hook)
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model)
        flow.layer_gpus.update({"first": 0, "second": 1})
        flow.update_flow()
        ours = {"k": torch.zeros_like(_x())}
        result = flow(_x(), ours, ours).cpu()
        kept = ours["k"].cpu()
    torch.testing.assert_close((result, kept), (expected, cache["k"]))
