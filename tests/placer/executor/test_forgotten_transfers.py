"""The proof that the test bench works: leave out any one transfer of a run, forwards or backwards,
and it raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from forgetful import Forgetful
from small_models import DiffusionUNet, Skips, TiedTokens
from splitting import assert_same, scatter_layers, step, twins
from torch import Tensor, nn

from placer import DataFlow, devices
from placer.capture.pytrees import flatten
from placer.errors import StageError
from placer.testing import MixedDevicesError, logical_devices
from placer.zoo import unet

Make = Callable[[], nn.Module]
Inputs = tuple[Tensor, ...]


class Refused(nn.Module):
    """Runs through hooks, for its branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.norm = (
            *(nn.Linear(4, 4) for _ in range(3)),
            nn.LayerNorm(4),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.second(y) if y.sum() > 0 else self.third(y)
        normed: Tensor = self.norm(z + y)
        return normed * x


MODELS = {
    "skips": (Skips, (torch.randn(4, 5, dtype=torch.float64),)),
    "unet": (lambda: unet(width=2), (torch.randn(2, 3, 16, 16, dtype=torch.float64),)),
    "diffusion": (
        lambda: DiffusionUNet(channels=8, levels=1),
        (torch.randn(1, 3, 4, 4, dtype=torch.float64), torch.tensor([3])),
    ),
    # Its tied weight is moved to the head's device in every run, and the gradient lands on a
    # Parameter elsewhere.
    "tied": (TiedTokens, (torch.tensor([[1, 2, 3], [0, 5, 2]]),)),
    "through hooks": (Refused, (torch.randn(6, 4, dtype=torch.float64),)),
}


class _Transfers:
    """Counts the transfers of a run, and forgets one of them.

    Args:
        forward: the number of the transfer that is not made.
        backward: the number of the transfer whose gradient is not brought back.
    """

    def __init__(self, forward: int | None = None, backward: int | None = None) -> None:
        self._forward, self._backward = forward, backward
        self._move, self._copy = devices.move, devices.copy
        self._left_behind: Tensor | None = None
        self.forwards = 0
        self.backwards: list[bool] = []

    def move(self, tensor: Tensor, target: torch.device) -> Tensor:
        source = devices.location(tensor)
        if devices.same(source, target):
            return tensor
        number = self.forwards
        self.forwards += 1
        differentiable = tensor.requires_grad and torch.is_grad_enabled()
        self.backwards.append(differentiable)
        if number == self._forward or tensor is self._left_behind:
            self._left_behind = tensor
            return tensor
        if number == self._backward:
            return _OneWay.apply(tensor, self._copy, target)
        return self._move(tensor, target)


class _OneWay(torch.autograd.Function):
    """A transfer whose way back was forgotten."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, copy: Callable[..., Tensor], target: torch.device
    ) -> Tensor:
        return copy(tensor, target)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


@contextmanager
def _counted(monkeypatch: pytest.MonkeyPatch, transfers: _Transfers) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(devices, "move", transfers.move)
        yield


def _flow(name: str) -> tuple[DataFlow, Inputs]:
    make, inputs = MODELS[name]
    model, _ = twins(make)
    flow = DataFlow(model, fine_grained=True)
    scatter_layers(flow, 4, seed=3)
    # captured, and the root's own state settled, so that what follows is transfers of a run alone
    flow(*inputs)
    return flow, inputs


def _train(flow: DataFlow, inputs: Inputs) -> None:
    flow.zero_grad()
    outputs = flatten(flow(*inputs))[0]
    targets = [devices.copy(torch.zeros_like(output), flow.output_device) for output in outputs]
    sum(
        nn.functional.mse_loss(output, target)
        for output, target in zip(outputs, targets, strict=True)
    ).backward()


def _caught(run: Callable[[], None]) -> bool:
    try:
        run()
    except MixedDevicesError:
        return True
    return False


@pytest.mark.covering(every=4)
@pytest.mark.parametrize("name", MODELS)
def test_a_run_with_all_its_transfers_equals_the_unsplit_one(name: str) -> None:
    make, inputs = MODELS[name]
    model, reference = twins(make)
    with logical_devices(4):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 4, seed=3)
        split = step(flow, model, inputs, {})
    assert_same(split, step(reference, reference, inputs, {}))


@pytest.mark.covering(every=4)
@pytest.mark.parametrize("name", MODELS)
def test_every_forgotten_transfer_forwards_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with logical_devices(4):
        flow, inputs = _flow(name)
        with _counted(monkeypatch, every := _Transfers()):
            _train(flow, inputs)
        assert every.forwards >= 3
        missed = []
        for number in range(every.forwards):
            with _counted(monkeypatch, _Transfers(forward=number)):
                if not _caught(lambda: _train(flow, inputs)):
                    missed.append(number)
    assert missed == []


@pytest.mark.covering(every=4)
@pytest.mark.parametrize("name", MODELS)
def test_every_forgotten_transfer_backwards_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with logical_devices(4):
        flow, inputs = _flow(name)
        with _counted(monkeypatch, every := _Transfers()):
            _train(flow, inputs)
        numbers = [
            number for number, differentiable in enumerate(every.backwards) if differentiable
        ]
        assert len(numbers) >= 2
        missed = []
        for number in numbers:
            with _counted(monkeypatch, _Transfers(backward=number)):
                if not _caught(lambda: _train(flow, inputs)):
                    missed.append(number)
    assert missed == []


def test_a_gradient_that_lands_on_a_parameter_of_another_device_is_caught() -> None:
    with logical_devices(2):
        weight = nn.Parameter(torch.ones(3))
        weight.data = devices.copy(weight, torch.device("cpu:0"))
        elsewhere = _OneWay.apply(weight, devices.copy, torch.device("cpu:1"))
        with pytest.raises(MixedDevicesError, match="gradient"):
            (elsewhere * elsewhere).sum().backward()


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_every_transfer_that_a_training_step_forgets_shows_in_its_loss_or_gradients(
    schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = twins(Skips)
    inputs = torch.randn(4, 5, dtype=torch.float64)
    goal = torch.zeros_like(reference(inputs)).detach()
    for part, its in zip(inputs.chunk(2), goal.chunk(2), strict=True):
        (nn.functional.mse_loss(reference(part), its) / 2).backward()
    expected = [parameter.grad for parameter in reference.parameters()]
    forgetful = Forgetful(monkeypatch)

    def caught() -> bool:
        try:
            train(inputs, goal, chunks=2)
        except (StageError, MixedDevicesError):
            return True
        found = [parameter.grad for parameter in model.parameters()]
        return not all(
            torch.allclose(one.cpu(), other)
            for one, other in zip(found, expected, strict=True)
            if other is not None
        )

    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 3, seed=3)
        train = flow.train_step(nn.functional.mse_loss, schedule=schedule)
        assert not caught()
        forgetful.sent = 0
        assert not caught()
        every, missed = forgetful.sent, []
        assert every >= 8
        for number in range(every):
            forgetful.sent, forgetful.forgotten = 0, number
            if not caught():
                missed.append(number)
    assert missed == []
