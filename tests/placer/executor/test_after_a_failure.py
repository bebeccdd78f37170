"""After a step that failed the model is as before it, but for gradients, which are gone; the next
step is right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from faults import Faults
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from unverified import unverified

from placer import BatchOptions, DataFlow
from placer.errors import InputError, StageError
from placer.executor.training.training_pipeline import Order

CHUNKS = 2


class _Model(nn.Module):
    """Convolutions with delayable weight gradients, dropout, and a head that some batches skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.brittle, self.second, self.third = (
            nn.Hardtanh(),
            nn.Conv1d(3, 3, 3),
            nn.Conv1d(3, 2, 3),
        )
        self.other = nn.Conv1d(3, 2, 3)

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        x = self.second(self.brittle(self.drop(self.norm(self.first(x)))))
        result: Tensor = self.other(x) if other else self.third(x)
        return result.mean(2)


class _Pair:
    """A placed model and its unsplit twin."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = _Model().double()
        self.whole = copy.deepcopy(self.model)
        self.flow = DataFlow(self.model, ["cpu:0", "cpu:1"])
        self.flow.layer_gpus.update(first=0, norm=0, drop=0, brittle=1, second=1, third=1, other=1)
        self.flow.update_flow()
        self.optimizer, self.plain = (
            torch.optim.SGD(each.parameters(), 0.1) for each in (self.model, self.whole)
        )
        self.step = self.flow.train_step(functional.mse_loss, self.optimizer, **options)

    def unsplit(self, other: bool = False, step: bool = True) -> Tensor:
        """A step of the unsplit model over the same micro-batches."""
        self.plain.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for x, target in zip(*(tensor.chunk(CHUNKS) for tensor in _batch()), strict=True):
            loss = functional.mse_loss(self.whole(x, other), target) / CHUNKS
            loss.backward()
            total += loss.detach()
        if step:
            self.plain.step()
        return total

    def same(self) -> None:
        """Both models agree in state and gradients."""
        for name, value in self.whole.state_dict().items():
            torch.testing.assert_close(
                self.model.state_dict()[name], value, atol=1e-10, rtol=1e-10, msg=name
            )
        for (name, ours), theirs in zip(
            self.model.named_parameters(), self.whole.parameters(), strict=True
        ):
            assert (ours.grad is None) == (theirs.grad is None), name
            torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-10, rtol=1e-10, msg=name)


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    numbers = [
        torch.randn(size, generator=generator, dtype=torch.float64) for size in ((4, 1, 10), (4, 2))
    ]
    return numbers[0], numbers[1]


class _WeightsFault(TorchDispatchMode):
    """Fails in the pass of weight gradients, at the second convolution; those of the third wait
    then to be added."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is torch.ops.aten.convolution_backward.default
            and not args[-1][0]
            and args[2].shape == (3, 3, 3)
        ):
            raise ValueError("a fault")
        return func(*args, **(kwargs or {}))


def test_a_failure_in_the_pass_of_weight_gradients_leaves_none_to_the_next_step() -> None:
    pair = _Pair(schedule="zero-bubble")
    pair.model.drop.p = pair.whole.drop.p = 0.0
    pair.step(*_batch(), chunks=CHUNKS)
    pair.unsplit()
    with (
        _WeightsFault(),
        pytest.raises(StageError, match=r"the weights pass of segment 1 .* 'second'"),
    ):
        pair.step(*_batch(), chunks=CHUNKS)
    pair.step(*_batch(), chunks=CHUNKS)
    pair.unsplit()
    pair.same()


@pytest.mark.covering
@pytest.mark.parametrize("in_the_first", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_random_numbers_are_as_before_the_step_that_failed(
    schedule: Order, in_the_first: bool
) -> None:
    pair = _Pair(schedule=schedule, batch_options=BatchOptions(verify=False))
    unverified(pair.flow)
    with Faults() as faults:
        if not in_the_first:
            torch.manual_seed(2)
            pair.step(*_batch(), chunks=CHUNKS)
            torch.manual_seed(2)
            pair.unsplit()
        torch.manual_seed(3)
        before = torch.get_rng_state()
        faults.reset()
        faults.at["forward", 0 if in_the_first else CHUNKS - 1] = lambda: ValueError("a fault")
        with pytest.raises(StageError):
            pair.step(*_batch(), chunks=CHUNKS)
        assert torch.equal(torch.get_rng_state(), before)


def _bad_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target, reduction="none")


@pytest.mark.parametrize("waiting", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_new_step_that_fails_at_once_leaves_no_gradient_of_another_as_zero_grad_does(
    waiting: bool,
) -> None:
    pair = _Pair()
    pair.model.drop.p = 0.0
    x, target = _batch()
    pair.step({"x": x, "other": True}, target, chunks=CHUNKS)
    pair.step((x,), target, chunks=CHUNKS, update=not waiting)
    before = {name: value.clone() for name, value in pair.model.state_dict().items()}
    with pytest.raises(InputError, match="one number"):
        pair.flow.train_step(_bad_loss)(x, target)
    assert all(parameter.grad is None for parameter in pair.model.parameters())
    pair.optimizer.step()  # of a caller who goes on
    for name, value in before.items():
        assert torch.equal(pair.model.state_dict()[name], value), name


def test_a_batch_that_is_refused_changes_no_gradient() -> None:
    pair = _Pair()
    x, target = _batch()
    pair.step(x, target, chunks=CHUNKS, update=False)
    before = {
        name: parameter.grad.clone()
        for name, parameter in pair.model.named_parameters()
        if parameter.grad is not None
    }
    with pytest.raises(InputError):
        pair.step(x, target[:3], chunks=CHUNKS)
    assert before
    for name, gradient in before.items():
        torch.testing.assert_close(pair.model.get_parameter(name).grad, gradient)


def test_a_part_that_a_batch_does_not_use_is_not_stepped_by_the_gradient_of_an_earlier_one() -> (
    None
):
    pair = _Pair()
    pair.model.drop.p = pair.whole.drop.p = 0.0
    x, target = _batch()
    for other in (True, False, True, False, False):
        pair.step({"x": x, "other": other}, target, chunks=CHUNKS)
        pair.unsplit(other)
        pair.same()


class _Failing(torch.optim.SGD):
    """Fails when it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ValueError("no step")
        return super().step(closure)


@pytest.mark.parametrize("max_norm", [None, 1e3])
def test_after_an_optimizer_that_failed_a_scaler_unscales_the_next_batch(
    max_norm: float | None,
) -> None:
    pair = _Pair()
    pair.model.drop.p = pair.whole.drop.p = 0.0
    optimizer = _Failing(pair.model.parameters(), 0.1)
    step = pair.flow.train_step(
        functional.mse_loss,
        optimizer,
        scaler=torch.amp.GradScaler("cpu", init_scale=1024.0),
        max_norm=max_norm,
    )
    optimizer.fails = True
    with pytest.raises(ValueError, match="no step") as caught:
        step(*_batch(), chunks=CHUNKS)
    assert "in the optimizer's part of a training step" in caught.value.__notes__[0]
    pair.unsplit(step=False)
    pair.same()
    optimizer.fails = False
    step(*_batch(), chunks=CHUNKS)
    pair.unsplit()
    pair.same()
