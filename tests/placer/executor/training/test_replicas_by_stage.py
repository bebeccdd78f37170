"""Pipelines that share replicas: what a training step offers, in combination, and its failures."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from replicated import by_stage, unsplit_loss
from torch import Tensor, nn
from torch.nn import functional
from unverified import unverified

from placer import DataFlow, devices
from placer.errors import InputError, StageError
from placer.executor.engine.compiled_segments import CompiledSegment
from placer.executor.engine.shares import part_sizes
from placer.executor.inference import compiled_streams
from placer.executor.state.replication import Replication
from placer.executor.training.stages import compiled_stages
from placer.executor.training.stages.split_segments import OpenedSegment
from placer.schema import Placement, Replica
from placer.testing import logical_devices

CLOSE: Any = {"atol": 1e-10, "rtol": 1e-10, "check_device": False}

Optimizers = list[torch.optim.Optimizer]


class _Net(nn.Module):
    """An embedding, which the last stage reads too and may share weights with, and a norm."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 6)
        self.first = nn.Linear(6, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 6)
        self.last = nn.Linear(6, 7, bias=False)
        if tied:
            self.last.weight = self.table.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.table(x)
        z = self.norm(self.first(y)).tanh()
        result: Tensor = self.last(self.second(z).relu() + y)
        return result


def _data(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randint(7, (samples,)), torch.randint(7, (samples,))


def _flow(model: nn.Module, placement: Placement) -> DataFlow:
    flow = DataFlow(model)
    flow.update_flow(placement)
    return unverified(flow)


def _same(model: nn.Module, whole: nn.Module) -> None:
    mine, theirs = model.state_dict(), whole.state_dict()
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, msg=name, **CLOSE)


def _adagrad(parameters: Iterable[nn.Parameter]) -> Optimizers:
    return [torch.optim.Adagrad(parameters, lr=0.05)]


def _adam(parameters: Iterable[nn.Parameter]) -> Optimizers:
    return [torch.optim.Adam(parameters, lr=0.02)]


def _two(parameters: Iterable[nn.Parameter]) -> Optimizers:
    one, two, *others = parameters
    groups = [{"params": [one], "lr": 0.2}, {"params": [two]}]
    return [torch.optim.SGD(groups, lr=0.1, momentum=0.9), torch.optim.Adam(others, lr=0.02)]


class _Twins:
    """A model in a flow, and its unsplit copy, which takes the same steps.

    Args:
        placement: of the model.
        make: makes the optimizers of either.
        model: the model.
        scale: of the loss at first, by a GradScaler; 0 for no GradScaler.
        max_norm: that gradients are clipped to; None to clip nothing.
    """

    def __init__(
        self,
        placement: Placement,
        make: Callable[[Iterable[nn.Parameter]], Optimizers] = _adam,
        model: nn.Module | None = None,
        scale: float = 0.0,
        max_norm: float | None = None,
    ) -> None:
        self.model = _Net() if model is None else model
        self.whole = copy.deepcopy(self.model)
        self.both = self.model, self.whole
        self.mine, self.theirs = (make(one.parameters()) for one in self.both)
        self.scalers = [
            torch.amp.GradScaler("cpu", scale, growth_interval=1, enabled=scale > 0) for _ in "ab"
        ]
        self.max_norm = max_norm
        self.flow = _flow(self.model, placement)
        options: dict[str, Any] = {"scaler": self.scalers[0]} if scale else {}
        if max_norm is not None:
            options["max_norm"] = max_norm
        self.step = self.flow.train_step(functional.cross_entropy, self.mine, **options)
        self.place(placement)

    def place(self, placement: Placement) -> None:
        """Place the model, perhaps in another way."""
        self.flow.update_flow(placement)
        self._placement = placement
        self._waits = False

    def each(self, change: Callable[[Any], object]) -> None:
        """Change both models in the same way."""
        for one in self.both:
            change(one)

    def train(self, samples: int, seed: int = 1, update: bool = True) -> None:
        """Take a step with both, and compare the loss, the gradients and the weights."""
        inputs, target = _data(samples, seed)
        loss = self.step(inputs, target, update=update)
        replication = Replication.from_placement(self._placement, torch.device)
        sizes = part_sizes(replication, self._placement.chunks, samples)
        expected = self.unsplit(inputs, target, sizes, update)
        torch.testing.assert_close(loss.double(), expected, equal_nan=True, **CLOSE)
        if not update:
            for mine, theirs in zip(*(one.parameters() for one in self.both), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, **CLOSE)
        _same(*self.both)
        assert self.scalers[0].get_scale() == self.scalers[1].get_scale()

    def unsplit(
        self, inputs: Tensor, target: Tensor, sizes: Sequence[int], update: bool = True
    ) -> Tensor:
        """Take a step with the unsplit model, and return its loss."""
        scaler = self.scalers[1]
        scale = scaler.get_scale()
        if not self._waits:
            self.whole.zero_grad()
        self._waits = not update

        def scaled(output: Tensor, goal: Tensor) -> Tensor:
            return functional.cross_entropy(output, goal) * scale

        loss = unsplit_loss(self.whole, scaled, inputs, target, sizes) / scale
        if update:
            scaler.scale(torch.ones(()))  # what a step does with a scaler at first
            for optimizer in self.theirs:
                scaler.unscale_(optimizer)
            if self.max_norm is not None:
                nn.utils.clip_grad_norm_(self.whole.parameters(), self.max_norm)
            for optimizer in self.theirs:
                scaler.step(optimizer)
            scaler.update()
        return loss


def _unlike(model: nn.Module, chunks: int = 2) -> Placement:
    """Return a placement whose first pipeline takes three of four samples."""
    found = by_stage(model, (2, 1), chunks=chunks)
    shares = tuple(Replica(device=f"cpu:{index}", samples=3 - 2 * index) for index in range(2))
    return found.model_copy(update={"replicas": {"cpu:0": shares}, "batch_size": 4})


CASES: dict[str, Any] = {
    "accumulated": {"make": _adagrad, "updates": (False, True, False, True)},
    "clipped": {"max_norm": 0.1, "updates": (True, False, False, True), "schedule": "zero-bubble"},
    "scaled": {"scale": 2.0**8, "max_norm": 0.5, "updates": (False, True, True, True)},
    "tied": {"tied": True, "schedule": "zero-bubble", "recompute": ("cpu:0",)},
    "thawed": {"tied": True, "frozen": ("table", "first")},
    "two optimizers": {"make": _two, "frozen": ("norm",)},
    "state on the host": {"tied": True, "optimizer_state": "host"},
}


@pytest.mark.covering
@pytest.mark.parametrize("counts", [(2, 1), (1, 2), (2, 3), ()])
@pytest.mark.parametrize("name", CASES)
def test_what_a_step_offers_works_together_and_with_uneven_batches(
    name: str, counts: tuple[int, ...]
) -> None:
    case = dict(CASES[name])
    updates, frozen = case.pop("updates", (True,) * 4), case.pop("frozen", ())
    options = {key: case.pop(key) for key in ("make", "scale", "max_norm") if key in case}
    model = _Net(case.pop("tied", False))
    for path in frozen:
        model.get_submodule(path).requires_grad_(False)
    with logical_devices(sum(counts) or 3):
        placement = by_stage(model, counts, chunks=2) if counts else _unlike(model)
        twins = _Twins(placement.model_copy(update=case), model=model, **options)
        for number, (samples, update) in enumerate(zip((24, 13, 24, 5), updates, strict=True)):
            if number == 2:
                twins.each(lambda one: one.requires_grad_())
            if number == 2 and "scale" in options:  # the scaler skips this step
                twins.each(lambda one: one.last.weight.data[0].fill_(torch.inf))
                twins.train(samples, number, update)
                twins.each(lambda one: one.last.weight.data[0].fill_(0.25))
            else:
                twins.train(samples, number, update)
        assert twins.step.pipelines[0].pipelines > 1
        for mine, theirs in zip(twins.mine, twins.theirs, strict=True):
            found, expected = mine.state_dict(), theirs.state_dict()
            assert found["param_groups"] == expected["param_groups"]
            torch.testing.assert_close(found["state"], expected["state"], **CLOSE)


@pytest.mark.parametrize("counts", [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_run_once_a_step(counts: tuple[int, ...], kind: str) -> None:
    with logical_devices(3):
        twins = _Twins(by_stage(_Net(), counts, chunks=2))
        seen: list[Tensor] = []

        def double(given: Tensor) -> Tensor | None:
            if kind == "register_hook":
                return 2 * given
            assert given.grad is not None
            given.grad.mul_(2)
            seen.append(given)
            return None

        twins.each(lambda one: getattr(one.first.weight, kind)(double))
        with pytest.warns(UserWarning, match="has hooks"):
            twins.step(*_data(7))
        if kind == "register_hook":
            twins.unsplit(*_data(7), [2, 2, 2, 1])
        else:
            assert len(seen) == 1
            twins.unsplit(*_data(7), [7])
        _same(*twins.both)


class _Scale(nn.Module):
    """A factor for each feature."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, dtype=torch.float64) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("recompute", [(), ("cpu:0",), ("cpu:0", "cpu:1", "cpu:2")])
@pytest.mark.parametrize("counts", [(2, 1), (1, 2)])
def test_every_unit_drops_values_of_its_own_and_the_same_when_it_is_recomputed(
    counts: tuple[int, ...], recompute: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    features, samples = 64, 12
    model = nn.Sequential(*(make for _ in "ab" for make in (_Scale(features), nn.Dropout(0.5))))

    def loss_fn(output: Tensor, _: Any) -> Tensor:
        return output.sum(1).mean()

    with logical_devices(3):
        flow = _flow(model, by_stage(model, counts, chunks=2, recompute=recompute))
        step = flow.train_step(loss_fn)
        ones = torch.ones(samples, features, dtype=torch.float64)
        step(ones)
        found = []
        for seed in (5, 5, 6):
            torch.manual_seed(seed)
            _, output = step(ones, outputs=True)
            found.append([output, *(weight.grad.clone() for weight in model.parameters())])
            # what was dropped forwards has no gradient
            for weight in model.parameters():
                torch.testing.assert_close(weight.grad * weight, output.mean(0), **CLOSE)
            assert len(torch.unique(output, dim=0)) == samples
    first, again, other = found
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one, two)
    assert not torch.equal(first[0], other[0])


class _Failing(nn.Module):
    """An index that is too large fails in the second stage, when the first one has run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.second = nn.Linear(8, 6)
        self.table, self.last = nn.EmbeddingBag(9, 6, mode="sum"), nn.Linear(6, 3)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        y = self.second(self.drop(self.norm(self.first(x))))
        result: Tensor = self.last(y + self.table(index))
        return result


@pytest.mark.parametrize("counts", [(2, 1), (1, 2)])
def test_a_failure_in_one_unit_leaves_everything_as_it_was(counts: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    x, index, target = torch.randn(12, 5), torch.randint(9, (12, 2)), torch.randint(3, (12,))
    wrong = index.clone()
    wrong[11, 0] = 9  # in the last unit
    with logical_devices(3):
        model = _Failing()
        flow = _flow(model, by_stage(model, counts, chunks=2))
        (optimizer,) = _adam(model.parameters())
        step = flow.train_step(functional.cross_entropy, optimizer)
        step((x, index), target)
        step((x, index), target)
        before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        random = torch.get_rng_state()
        with pytest.raises(StageError, match=r"micro-batch 1 failed .* on cpu:2, layer 'table'"):
            step((x, wrong), target)
        assert torch.equal(torch.get_rng_state(), random)
        after = [model.state_dict(), optimizer.state_dict()]
        torch.testing.assert_close(after, before, atol=0, rtol=0, check_device=False)
        assert all(parameter.grad is None for parameter in model.parameters())
        step((x, index), target)


@pytest.mark.parametrize("counts", [(2, 1), (1, 2)])
def test_training_goes_on_after_undo_without_a_placement_and_with_another(
    counts: tuple[int, int],
) -> None:
    first, second = counts
    with logical_devices(3):
        twins = _Twins(by_stage(_Net(True), counts, chunks=2), model=_Net(True))
        (mine,) = twins.mine
        twins.train(12)
        twins.train(12, update=False)
        twins.flow.undo()
        state = [value for some in mine.state.values() for value in some.values()]
        gradients = [parameter.grad for parameter in twins.model.parameters()]
        for tensor in (*twins.model.parameters(), *gradients, *state):
            assert devices.location(tensor) == torch.device("cpu")
        for optimizer in (*twins.mine, *twins.theirs):
            optimizer.step()
            optimizer.zero_grad()
        _same(*twins.both)
        twins.place(by_stage(twins.model, (second, first), chunks=2))
        twins.train(7)


@pytest.mark.parametrize("counts", [(2, 1), (2, 2)])
def test_what_replicas_cannot_do_is_refused_by_name(counts: tuple[int, ...]) -> None:
    with logical_devices(4):
        model = _Net()
        flow = _flow(model, by_stage(model, counts))
        with pytest.raises(InputError, match="LBFGS evaluates the loss several times a step"):
            flow.train_step(functional.cross_entropy, torch.optim.LBFGS(model.parameters()))
        flow.undo()
        model.norm = nn.SyncBatchNorm(8).double()
        step = _flow(model, by_stage(model, counts)).train_step(functional.cross_entropy)
        with pytest.raises(InputError, match=r"'norm' is an nn\.SyncBatchNorm"):
            step(*_data(8))


class _Images(nn.Module):
    """Running statistics, a write in place and a skip from device to device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.relu = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)
        self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm(self.first(x)))
        result: Tensor = self.last(self.middle(y).tanh() + y)
        return result


@pytest.mark.parametrize(
    ("counts", "schedule", "samples"), [((2, 1), "1f1b", 16), ((1, 2), "zero-bubble", 15)]
)
def test_compiled_stages_that_pipelines_share_train_and_stream_as_the_unsplit_model(
    counts: tuple[int, ...], schedule: Any, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # every trial seems to take half the time of the one before it
    times = (2.0**-trial for trial in itertools.count())
    for module, name in ((compiled_stages, "_trial_ms"), (compiled_streams, "trial_ms")):
        trial = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, run=trial: (run(*given), next(times))[1])
    model = _Images()
    whole = copy.deepcopy(model)
    mine, theirs = (torch.optim.SGD(one.parameters(), 0.1, 0.9) for one in (model, whole))
    inputs, target = torch.randn(samples, 4).double(), torch.randn(samples, 2).double()
    placement = by_stage(model, counts, chunks=2, schedule=schedule)
    flow = _flow(model, placement)
    step = flow.train_step(functional.mse_loss, mine, compile="aot_eager")
    sizes = part_sizes(Replication.from_placement(placement, torch.device), 2, samples)
    for _ in range(2):
        loss = step(inputs, target)
        theirs.zero_grad()
        torch.testing.assert_close(
            loss, unsplit_loss(whole, functional.mse_loss, inputs, target, sizes), **CLOSE
        )
        theirs.step()
        for one, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(one, other, **CLOSE)
    (pipeline,) = step.pipelines
    kind = OpenedSegment if schedule == "zero-bubble" else CompiledSegment
    assert pipeline.pipelines == 2 and not step.not_compiled_because
    assert all(isinstance(stage.segment, kind) for stage in pipeline.stages)
    flow.eval()
    whole.load_state_dict(model.state_dict())
    whole.eval()
    batches = inputs[:14].split(2)
    for result, batch in zip(flow.stream(batches, compile="aot_eager"), batches, strict=True):
        torch.testing.assert_close(result, whole(batch).detach(), **CLOSE)
    held = {name.rpartition(" ")[2] for name in flow.compiled}
    assert held == {"cpu:0", "cpu:1", "cpu:2"} and not flow.not_compiled_because
