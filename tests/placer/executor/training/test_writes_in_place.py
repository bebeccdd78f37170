"""Models whose layers write in place to what they are given, or to state, train as the unsplit
model."""

from __future__ import annotations

import pytest
import torch
from splitting import twins
from torch import Tensor, nn
from torch.nn import functional
from unverified import unverified

from placer import DataFlow
from placer.executor.training.training_pipeline import Order
from placer.testing import logical_devices

CHUNKS = 4


class _FrozenStem(nn.Module):
    """What comes without a gradient from another device is given one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.scale, self.last = (
            nn.Linear(4, 4).requires_grad_(False),
            _Scale(),
            nn.Linear(4, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.scale(self.stem(x)))
        return result


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.weight)


class _Moving(nn.Module):
    """A layer that gives a part of a buffer, and one that moves the buffer on."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.moves, self.last = _Held(), _Moves(), nn.Linear(4, 4)


class _PartIsReadLater(_Moving):
    def forward(self, x: Tensor) -> Tensor:
        part = self.held(x)
        y = self.moves(x, self.held.table)
        result: Tensor = self.last(y) + part
        return result


class _PartIsWritten(_Moving):
    def forward(self, x: Tensor) -> Tensor:
        y = self.moves(x, self.held(x))
        result: Tensor = self.last(y) + self.held.table[0]
        return result


class _Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        part: Tensor = self.table[0]
        return part


class _Moves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        with torch.no_grad():
            table.add_(y.detach().mean(0))
        return y


class _SharedSpectralNorm(nn.Module):
    """Torch leaves a vector of one call to the next one, as ``out`` of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.normed = nn.utils.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.normed(self.second(self.normed(self.first(x))))
        return result


class _OwnStatistics(nn.Module):
    """A buffer with the name of a statistic, that is read back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), _OwnNorm(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(self.first(x)))
        return result


class _OwnNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.running_mean.mul_(0.5).add_(x.detach().mean(0))
        return x * self.running_mean


class _NormTwice(nn.Module):
    """Its second call moves the running statistics on from where the first left them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.second(self.norm(self.first(x))))
        return result


class _LargestNorm(nn.Module):
    """A weight that forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.picks, self.embedding, self.last = (
            _Picks(),
            nn.Embedding(5, 4, max_norm=1.0),
            nn.Linear(4, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.embedding(self.picks(x)))
        return result


class _Picks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(1)


MODELS = [
    _FrozenStem,
    _PartIsReadLater,
    _PartIsWritten,
    _SharedSpectralNorm,
    _OwnStatistics,
    _NormTwice,
    _LargestNorm,
]
SCHEDULES = pytest.mark.parametrize("schedule", ["1f1b", "fill-drain"])
RECOMPUTE = pytest.mark.parametrize("recompute", [(), (0, 1)], ids=["kept", "recomputed"])
IN_TURN = "ignore:buffer .* is changed in one segment and used in another:UserWarning"


def _assert_two_steps_equal(
    make: type[nn.Module], schedule: Order, devices: int, recompute: tuple[int, ...]
) -> None:
    """Layers go to the devices in turn; the unsplit model trains on the same micro-batches."""
    model, whole = twins(make)
    inputs, target = torch.randn(2, 8, 4, dtype=torch.float64)
    flow = unverified(DataFlow(model))  # micro-batches depend on one another
    for index, name in enumerate(flow.layer_gpus):
        flow.layer_gpus[name] = index % devices
    flow.recompute = [device for device in recompute if device < devices]
    flow.update_flow()
    step = flow.train_step(functional.mse_loss, schedule=schedule)
    for _ in range(2):
        step(inputs, target, chunks=CHUNKS)
        whole.zero_grad()
        for x, y in zip(inputs.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
            (functional.mse_loss(whole(x), y) / CHUNKS).backward()
    assert not flow.not_captured_because
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), msg=name)
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad, msg=name)
    for (name, ours), theirs in zip(model.named_buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, msg=name)


@pytest.mark.covering
@pytest.mark.filterwarnings(IN_TURN)
@RECOMPUTE
@SCHEDULES
@pytest.mark.parametrize("make", MODELS)
def test_two_steps_equal_the_unsplit_models(
    make: type[nn.Module], schedule: Order, recompute: tuple[int, ...]
) -> None:
    with logical_devices(2):
        _assert_two_steps_equal(make, schedule, 2, recompute)


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.filterwarnings(IN_TURN)
@RECOMPUTE
@SCHEDULES
@pytest.mark.parametrize("make", MODELS)
def test_two_steps_on_gpus_equal_the_unsplit_models(
    make: type[nn.Module], schedule: Order, recompute: tuple[int, ...]
) -> None:
    _assert_two_steps_equal(make, schedule, min(2, torch.cuda.device_count()), recompute)
