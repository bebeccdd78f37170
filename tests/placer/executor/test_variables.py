"""What forward reads and keeps outside of its modules: variables of its file, settings, attributes
of classes."""

from __future__ import annotations

import argparse
import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from placer import DataFlow
from placer.testing import logical_devices

X, Y = torch.randn(8, 6, dtype=torch.float64), torch.randint(4, (8,))
SCALE = 1.0
SCALES = {"s": 1.0}
SHARES = [1.0]
ARGS = argparse.Namespace(scale=1.0)
KEPT: list[Tensor] = []
CALLS = 0
COUNTS = {"calls": 0}


class Settings:
    scale = 1.0
    calls = 0


class Recorder:
    """An object in a variable of the file."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


RECORDER = Recorder()


def _scaled(x: Tensor) -> Tensor:
    return x * SCALE


class Net(nn.Module):
    """Two layers, with something of ``read`` or ``keep`` between them."""

    scale = 1.0
    kept: Any = None

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.own = types.SimpleNamespace(kept=None, scale=1.0)
        factor = [1.0]
        self._closed = lambda x: x * factor[0]
        self.factor = factor
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        read: dict[str, Callable[[], Tensor]] = {
            "variable": lambda: h * SCALE,
            "function": lambda: _scaled(h),
            "dict": lambda: h * SCALES["s"],
            "list": lambda: h * SHARES[0],
            "arguments": lambda: h * ARGS.scale,
            "namespace": lambda: h * self.own.scale,
            "class": lambda: h * Settings.scale,
            "own class": lambda: h * type(self).scale,
        }
        if self.way in read:
            h = read[self.way]()
        if self.way == "kept in a list":
            KEPT.append(h.pow(2).mean())
        if self.way == "kept by an object":
            RECORDER.seen.append(h.pow(2).mean())
        if self.way == "kept on the class":
            type(self).kept = h.pow(2).mean()
        if self.way == "kept in a namespace":
            self.own.kept = h.pow(2).mean()
        if self.way == "kept on torch's module":
            self.b.kept = h.pow(2).mean()  # type: ignore[assignment]
        if self.way == "counted":
            global CALLS
            CALLS += 1
            COUNTS["calls"] += 1000
            Settings.calls += 1000
        return self.b(h)  # type: ignore[no-any-return]


def _placed(model: nn.Module) -> DataFlow:
    flow = DataFlow(model, device_ids=["cpu:0", "cpu:1"])
    flow.layer_gpus.update(a=0, b=1)
    flow.update_flow()
    return flow


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(
    ("way", "change"),
    [
        ("variable", lambda patch, model: patch.setitem(globals(), "SCALE", 2.0)),
        ("function", lambda patch, model: patch.setitem(globals(), "SCALE", 2.0)),
        ("dict", lambda patch, model: patch.setitem(SCALES, "s", 2.0)),
        ("list", lambda patch, model: patch.setitem(globals(), "SHARES", [2.0])),
        ("arguments", lambda patch, model: patch.setattr(ARGS, "scale", 2.0)),
        ("namespace", lambda patch, model: patch.setattr(model.own, "scale", 2.0)),
        ("class", lambda patch, model: patch.setattr(Settings, "scale", 2.0)),
        ("own class", lambda patch, model: patch.setattr(Net, "scale", 2.0)),
    ],
)
def test_what_forward_reads_may_change_between_calls(
    way: str, change: Any, monkeypatch: Any
) -> None:
    model = Net(way)
    unsplit = copy.deepcopy(model)
    with logical_devices(2):
        flow = _placed(model)
        step = flow.train_step(functional.cross_entropy)
        before = flow(X).cpu()
        torch.testing.assert_close(before, unsplit(X))
        change(monkeypatch, model)
        unsplit.own.scale = model.own.scale
        torch.testing.assert_close(flow(X).cpu(), unsplit(X))
        assert not torch.allclose(flow(X).cpu(), before)
        torch.testing.assert_close(
            step(X, Y, chunks=2).cpu(), functional.cross_entropy(unsplit(X), Y).detach()
        )
        assert not flow.not_captured_because


KEPT_TENSORS: dict[str, Callable[[Any], Any]] = {
    "kept in a list": lambda model: KEPT.pop(),
    "kept by an object": lambda model: RECORDER.seen.pop(),
    "kept on the class": lambda model: Net.kept,
    "kept in a namespace": lambda model: model.own.kept,
    "kept on torch's module": lambda model: model.b.kept,
}


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("way", KEPT_TENSORS)
def test_what_forward_keeps_is_that_of_each_call(way: str) -> None:
    model, kept = Net(way), KEPT_TENSORS[way]
    unsplit = copy.deepcopy(model)
    try:
        with logical_devices(2):
            flow = _placed(model)
            for x in (X, 2 * X, 3 * X):
                flow(x)
                ours = kept(model)
                unsplit(x)
                assert not isinstance(ours, FakeTensor) and ours.grad_fn is not None
                torch.testing.assert_close(ours.cpu(), kept(unsplit))
                assert not KEPT and not RECORDER.seen
            assert "keeps a tensor in" in flow.not_captured_because
    finally:
        Net.kept = None


def test_what_forward_itself_changes_has_nothing_captured_anew() -> None:
    with logical_devices(2):
        flow = _placed(Net("counted"))
        flow(X)
        (before,) = flow.placed._plans
        flow(X)
        assert [*flow.placed._plans] == [before] and not flow.not_captured_because
