"""What forward does beside its result: a graph of operations would lose it, so it is written into
the graph or refused.

Each model is called twice, as what one call leaves behind is what the next one finds.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from counted_captures import count_captures
from splitting import assert_same, assert_split_equals_unsplit, scatter_layers, step, twins
from torch import Tensor, nn
from torch.nn.utils import prune

from placer import DataFlow, capture_graph, profile
from placer.testing import logical_devices

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)


class ReplacesBuffers(_Base):
    """An average, and a count, that are other tensors after every call; the old average has a part
    in the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * self.average
        self.calls = self.calls + 1
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(dim=0)
        return self.third(self.second(y) * self.average) * self.calls


class SharedModuleReplacesItsBuffer(_Base):
    """The module whose buffer is replaced has two names, and is called under both."""

    class Count(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return x * self.calls

    def __init__(self) -> None:
        super().__init__()
        self.one = self.Count()
        self.other = self.one

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.other(self.second(self.one(self.first(x)))))


class NormalisesForNothing(_Base):
    """A head whose result nobody reads; what its normalisation has seen is kept all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.norm(self.second(y))
        return self.third(y)


class KeepsItsState(_Base):
    """A recurrent state from call to call, None before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.state: tuple[Tensor, int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.state is not None:
            y = y + self.state[0]
        self.state = (y.detach(), 1)
        return self.third(self.second(y))


class AppendsToAList(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.seen.append(y.detach())
        return self.third(self.second(y) + sum(self.seen))


class FillsAnEmptyBuffer(_Base):
    """Not captured until the buffer is there: after the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.scale is None:
            self.scale = y.detach().mean(dim=0)
        return self.third(self.second(y)) * self.scale


class ClipsAGradient(_Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return self.third(self.second(y))


class SeedsItsGenerator(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        self.generator.manual_seed(3)
        noise = torch.rand(4, generator=self.generator, dtype=x.dtype).to(x.device)
        return self.third(self.second(self.first(x) + noise))


class DrawsFromPython(_Base):
    """Skips a layer now and then."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.third(self.second(y) if random.random() < 0.5 else y)


class DrawsFromNumpy(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)) * float(numpy.random.rand()))


class SeedsTorch(_Base):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return self.third(self.second(self.first(x) + torch.rand(4, dtype=x.dtype).to(x.device)))


class TakesTurns(_Base):
    """What it does depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        y = self.first(x)
        return self.third(self.second(y) if self._calls % 2 else y)


class WarmsUp(_Base):
    """It does something else in its thousandth call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.third(self.second(self.first(x))) * min(1.0, 0.1 + self.calls // 1000)


class Counts(_Base):
    """It counts its calls for others."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self._last = 0, ""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self._last = f"call {self.calls}"
        return self.third(self.second(self.first(x)))


CAPTURED: list[type[nn.Module]] = [
    ReplacesBuffers,
    SharedModuleReplacesItsBuffer,
    FillsAnEmptyBuffer,
    Counts,
    NormalisesForNothing,
]
REFUSED: dict[type[nn.Module], str] = {
    KeepsItsState: "'state' of 'the model'",
    AppendsToAList: "'seen' of 'the model'",
    ClipsAGradient: "Tensor.register_hook",
    SeedsItsGenerator: "torch.Generator",
    TakesTurns: "sets '_calls'",
    WarmsUp: "sets 'calls'",
    DrawsFromPython: "Python's random",
    DrawsFromNumpy: "numpy.random",
    SeedsTorch: "torch's generator",
}


@pytest.mark.covering
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("make", [*CAPTURED, *REFUSED])
def test_two_calls_split_equal_two_calls_unsplit(make: type[nn.Module], training: bool) -> None:
    model, reference = twins(make, training)
    with logical_devices(3):
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        for number in range(2):
            _seed()
            split = step(flow, model, (X + number,), {})
            assert REFUSED.get(make, "") in flow.not_captured_because
            assert (make in REFUSED) == (flow.not_captured_because != "")
            _seed()
            assert_same(split, step(reference, reference, (X + number,), {}))


def _seed() -> None:
    random.seed(5)
    numpy.random.seed(5)


def test_host_numbers_are_drawn_anew_in_every_call() -> None:
    # The branch that was taken at capture was taken ever after.
    model, reference = twins(DrawsFromPython)
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        _seed()
        given = [flow(X).detach().cpu() for _ in range(8)]
    _seed()
    for result in given:
        torch.testing.assert_close(result, reference(X).detach(), atol=1e-12, rtol=1e-12)
    assert len({float(result.sum()) for result in given}) == 2


@pytest.mark.covering(every=6)
@pytest.mark.parametrize("make", [*CAPTURED, *REFUSED])
def test_looking_at_a_model_leaves_nothing_on_it(make: type[nn.Module]) -> None:
    model, reference = twins(make)
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    capture_graph(model, X)
    assert before == (
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )
    profile(model, X, ["cpu:0", "cpu:1"], repeats=1, cache=False, progress=False)
    for (name, child), whole in zip(model.named_modules(), reference.modules(), strict=True):
        own = {
            key: value
            for key, value in vars(child).items()
            if not isinstance(value, (dict, torch.Generator))
        }
        assert own == {key: getattr(whole, key) for key in own}, name
        for key, buffer in child._buffers.items():
            assert buffer is whole._buffers[key] is None or torch.equal(
                buffer, whole._buffers[key]
            ), key
    _seed()
    left = step(model, model, (X,), {})
    _seed()
    assert_same(left, step(reference, reference, (X,), {}))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_pruned_model_is_captured(training: bool) -> None:
    # What prunes is a hook, which was taken for one of the user's.
    class Own(nn.Linear):
        pass

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Own(4, 4))
        prune.l1_unstructured(model[0], "weight", 0.5)
        prune.random_unstructured(model[2], "weight", 0.3)
        prune.l1_unstructured(model[2], "weight", 0.3)
        return model

    assert_split_equals_unsplit(make, (X,), training=training)


def test_a_model_that_fills_a_cache_in_its_first_call_is_captured_in_its_second() -> None:
    class Rotates(_Base):
        def __init__(self) -> None:
            super().__init__()
            self.angles: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] not in self.angles:
                self.angles[x.shape[1]] = torch.arange(
                    x.shape[1], dtype=x.dtype, device=x.device
                ).cos()
            return self.third(self.second(self.first(x) * self.angles[x.shape[1]].to(x.device)))

    model, reference = twins(Rotates)
    with logical_devices(3):
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        for _ in range(3):
            assert_same(step(flow, model, (X,), {}), step(reference, reference, (X,), {}))
        assert flow.not_captured_because == ""


def test_a_model_that_keeps_a_tensor_in_every_call_is_looked_at_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = count_captures(monkeypatch)
    model, _ = twins(KeepsItsState)
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    flow.update_flow()
    for _ in range(4):
        flow(X)
    assert len(looks) == 2
    assert "'state'" in flow.not_captured_because


def test_a_loss_that_a_module_keeps_trains_what_it_came_from() -> None:
    class Routed(_Base):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            self.balance = y.pow(2).mean()
            return self.third(self.second(y))

    model, reference = twins(Routed)
    with logical_devices(3):
        flow = DataFlow(model)
        flow.layer_gpus.update(first=1, second=2, third=0)
        flow.update_flow()
        (flow(X).sum() + model.balance.to("cpu:0")).backward()
    (reference(X).sum() + reference.balance).backward()
    for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), its.grad, atol=1e-12, rtol=1e-12)


def _penalty(run: Callable[[Tensor], Tensor], model: nn.Module) -> list[Tensor]:
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    (slope.norm(dim=1) - 1).pow(2).mean().backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def test_gradients_of_gradients_cross_devices() -> None:
    # A copy's backward pass was no part of the graph: a gradient penalty trained half of the model,
    # wrongly.
    model, reference = twins(
        lambda: nn.Sequential(
            nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)
        )
    )
    with logical_devices(3):
        flow = DataFlow(model)
        flow.layer_gpus.update({"0": 1, "1": 1, "2": 2, "3": 0, "4": 1})
        flow.update_flow()
        given = _penalty(flow, model)
    expected = _penalty(reference, reference)
    assert len(given) == len(expected) > 3
    for mine, its in zip(given, expected, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-12, rtol=1e-12)


def test_a_model_that_differentiates_inside_is_split() -> None:
    # The tensor that was differentiated by was moved first: its copy has no part in what was
    # differentiated.
    class Relaxes(_Base):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            (slope,) = torch.autograd.grad(
                torch.tanh(self.second(y)).pow(2).sum(), y, create_graph=True
            )
            return self.third(y - 0.1 * slope)

    model, reference = twins(Relaxes)
    with logical_devices(3):
        flow = DataFlow(model)
        flow.layer_gpus.update(first=1, second=2, third=0)
        flow.update_flow()
        split = step(flow, model, (X,), {})
    assert_same(split, step(reference, reference, (X,), {}))
