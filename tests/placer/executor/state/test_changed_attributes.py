"""What a model's code reads of its own attributes is, in every call, what it is then: not what was
captured."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from counted_captures import count_captures
from covering import named
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow
from placer.capture.python_state import attribute_reads
from placer.executor.model_captures import Capture
from placer.testing import logical_devices


class Head(nn.Module):
    """Its temperature is a default of the class until it is set."""

    temperature = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) / self.temperature


class Config:
    """As those of transformers, it looks for its attributes in a way of its own, which asks it for
    another one."""

    aliases: ClassVar = {"moved_by": "shift"}

    def __init__(self) -> None:
        self.shift = 0.0
        self.inner = [self]

    def __getattribute__(self, name: str) -> Any:
        aliases = super().__getattribute__("aliases")
        return super().__getattribute__(aliases.get(name, name))


class Model(nn.Module):
    """Reads a number, a flag, a word, something that may be missing, a tensor, and what holds
    others.

    It counts its calls, and is counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), Head()
        self.power, self.doubled, self.kind = 1, False, "tanh"
        self.bias: float | Tensor | None = None
        self.scale = torch.ones((), dtype=torch.float64)
        self.calls = self.epoch = 0
        self._sign = 1.0
        self.config, self.gains, self.powers, self.act = Config(), {"x": 1.0}, [1], torch.abs

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.act(x) ** self.powers[0] * self._sign * self.gains["x"] + self.config.moved_by
        x = getattr(torch, self.kind)(self.first(x)) ** self.power * self.scale
        if self.bias is not None:
            x = x + self.bias
        return self.head(x + x if self.doubled else x)


def _shifted(shift: float) -> Config:
    config = Config()
    config.shift = shift
    return config


CHANGES: dict[str, Callable[[Model], object]] = {
    "a number": lambda model: setattr(model, "power", 2),
    "a number of another type": lambda model: setattr(model, "power", 3.0),
    "a flag": lambda model: setattr(model, "doubled", True),
    "a word": lambda model: setattr(model, "kind", "sigmoid"),
    "what was missing": lambda model: setattr(model, "bias", 0.5),
    "a tensor where none was": lambda model: setattr(
        model, "bias", torch.full((4,), 0.5, dtype=torch.float64)
    ),
    "another tensor": lambda model: setattr(
        model, "scale", torch.full((), 3.0, dtype=torch.float64)
    ),
    "a forward of its own": lambda model: setattr(
        model.head, "forward", lambda x: model.head.last(x) * 2
    ),
    "a private one": lambda model: setattr(model, "_sign", -1.0),
    "a function": lambda model: setattr(model, "act", torch.exp),
    "what a list holds": lambda model: model.powers.insert(0, 2),
    "another list": lambda model: setattr(model, "powers", [3]),
    "what a dict holds": lambda model: model.gains.update(x=0.5),
    "of an object": lambda model: setattr(model.config, "shift", 1.5),
    "another object": lambda model: setattr(model, "config", _shifted(2.5)),
    "a default of the class": lambda model: setattr(model.head, "temperature", 4.0),
}


def _split() -> tuple[Model, Model, DataFlow]:
    torch.manual_seed(0)
    model = Model().double()
    whole = copy.deepcopy(model)
    flow = DataFlow(model, device_ids=2)
    flow.layer_gpus.update({"first": 0, "head": 1})
    flow.update_flow()
    return model, whole, flow


def _batch() -> Tensor:
    return torch.randn(4, 4, dtype=torch.float64)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were captured since."""
    return count_captures(monkeypatch)


# Steps or streams read these in `make test`, or what is changed there is changed in the same way.
FURTHER = [
    *("a number", "a flag", "a word", "what was missing", "a tensor where none was"),
    *("a private one", "another object"),
]


@pytest.mark.covering
@pytest.mark.parametrize("change", named(CHANGES, FURTHER))
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_call_reads_what_was_changed(change: Callable[[Model], object], chunks: int) -> None:
    with logical_devices(2), torch.no_grad():
        model, whole, flow = _split()
        for each in (model, whole):
            each.eval()
        for call in range(3):
            batch = _batch()
            if call == 1:
                change(model), change(whole)
            torch.testing.assert_close(flow(batch, chunks=chunks).cpu(), whole(batch))
        assert flow.not_captured_because == ""


@pytest.mark.covering(every=4)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_training_step_reads_what_was_changed(change: Callable[[Model], object]) -> None:
    with logical_devices(2):
        model, whole, flow = _split()
        step = flow.train_step(functional.mse_loss)
        for call in range(3):
            if call == 1:
                change(model), change(whole)
            batch, target = _batch(), torch.randn(4, 2, dtype=torch.float64)
            loss = step(batch, target, chunks=2)
            whole.zero_grad()
            expected = functional.mse_loss(whole(batch), target)
            expected.backward()
            torch.testing.assert_close(loss.cpu(), expected.detach())
            for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
                assert ours.grad is not None and theirs.grad is not None
                torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
        assert len(step.pipelines) == 1  # of the model as it was nothing is kept


@pytest.mark.covering(every=8, first=4)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_stream_reads_what_was_changed(change: Callable[[Model], object]) -> None:
    with logical_devices(2), torch.no_grad():
        model, whole, flow = _split()
        for each in (model, whole):
            each.eval()
        for changed in (False, True):
            if changed:
                change(model), change(whole)
            batches = [_batch() for _ in range(2)]
            for result, batch in zip(flow.stream(batches), batches, strict=True):
                torch.testing.assert_close(result.cpu(), whole(batch))


def test_what_forward_itself_counts_and_what_it_never_reads_have_nothing_captured_anew(
    captures: list[nn.Module],
) -> None:
    with logical_devices(2), torch.no_grad():
        model, _, flow = _split()
        for epoch in range(4):
            model.epoch = epoch
            model.calls += 1
            flow(_batch())
    assert len(captures) == 1


def test_an_equal_value_has_nothing_captured_anew(captures: list[nn.Module]) -> None:
    with logical_devices(2), torch.no_grad():
        model, _, flow = _split()
        for _ in range(3):
            model.head.temperature = float("2.5")  # another object each time
            flow(_batch())
    assert len(captures) == 1


def test_what_changes_between_all_calls_is_right_and_warned_of_once() -> None:
    with logical_devices(2), torch.no_grad():
        model, whole, flow = _split()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for call in range(6):
                model.head.temperature = whole.head.temperature = 1.0 + call
                batch = _batch()
                torch.testing.assert_close(flow(batch).cpu(), whole(batch))
    texts = [str(one.message) for one in told]
    (warning,) = [text for text in texts if "captures the model again" in text]
    assert warning.startswith(
        "'temperature': forward reads this value, which changes between calls"
    )


def test_what_changes_now_and_then_is_not_warned_of() -> None:
    with logical_devices(2), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _, flow = _split()
        for call in range(60):
            model.power = 1 + call // 12
            flow(_batch())


def test_captures_of_the_model_as_it_was_are_not_kept() -> None:
    with logical_devices(2), torch.no_grad():
        model, _, flow = _split()
        model.eval()
        for call in range(6):
            model.power = 1 + call // 2
            flow(_batch(), chunks=2)
        gc.collect()
        kept = [
            found
            for found in gc.get_objects()
            if isinstance(found, Capture) and found.exported.attributes
        ]
        mine = [
            found
            for found in kept
            if any(module is model for module, _ in found.exported.attributes)
        ]
    assert len(mine) == 1


def test_classes_are_as_they_were_after_a_capture() -> None:
    model = Model()
    before = [dict(vars(cls)) for cls in (Model, Head, Config)]
    with attribute_reads.recorded_attributes(model) as notes:
        model(torch.randn(2, 4))
        model.doubled = True
        assert Head.temperature == 1.0 and not hasattr(Model, "power")
    assert [dict(vars(cls)) for cls in (Model, Head, Config)] == before
    read = {(holder, name) for holder, name in notes.only_read()}
    of_model = ("power", "kind", "bias", "scale", "_sign", "config", "gains", "powers", "act")
    of_config = {(model.config, name) for name in ("aliases", "shift")}
    assert read == {(model, name) for name in of_model} | of_config | {(model.head, "temperature")}
    assert (model.calls, model.doubled) == (1, True)


def test_an_attribute_that_is_taken_away_is_missing_while_it_is_noted_too() -> None:
    model = Model()
    with attribute_reads.recorded_attributes(model):
        del model.power
        with pytest.raises(AttributeError, match="power"):
            _ = model.power
        with pytest.raises(AttributeError, match="power"):
            del model.power
    assert "power" not in vars(model)


def test_another_list_of_very_many_items_is_another_one(captures: list[nn.Module]) -> None:
    with logical_devices(2), torch.no_grad():
        model, whole, flow = _split()
        for powers in ([1] * 2000, [2] * 2000):
            model.powers = whole.powers = powers
            for _ in range(2):
                batch = _batch()
                torch.testing.assert_close(flow(batch).cpu(), whole(batch))
    assert len(captures) == 2


class Flagged(nn.Module):
    flag: Any = False

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.flag else x + 1


class FlaggedToo(Flagged):
    pass


def test_a_default_of_a_class_is_its_own_though_the_class_it_is_of_is_in_the_model_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Flagged(), FlaggedToo(), nn.Linear(4, 2)).double()
    with logical_devices(2), torch.no_grad():
        whole = copy.deepcopy(model)
        flow = DataFlow(model, device_ids=2)
        flow.update_flow()
        for change in (False, True):
            model[2].flag = whole[2].flag = change
            batch = _batch()
            torch.testing.assert_close(flow(batch).cpu(), whole(batch))
