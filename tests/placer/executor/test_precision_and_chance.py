"""Training under autocast, and random numbers: both as on the unsplit model, as far as a pipeline
can."""

from __future__ import annotations

import copy

import pytest
import torch
from splitting import CapturedOnce
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow
from placer.executor.training.training_pipeline import Order
from placer.testing import logical_devices

SCHEDULES: tuple[Order, ...] = ("1f1b", "fill-drain", "zero-bubble")


class _Mixed(nn.Module):
    """A convolution, norms and linear layers: what autocast casts, and what it does not; and a look
    at what it did."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.narrow, self.scale, self.wide = (
            nn.Linear(16, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 8, bias=False),
        )
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = self.wide(self.scale(self.narrow(x.flatten(1)[:, :16])))
        x = x if x.dtype == torch.float32 else 2 * x
        result: Tensor = self.last(torch.tanh(x))
        return result


def _flow(model: nn.Module, count: int = 3) -> DataFlow:
    return _place(DataFlow(model), count)


def _place(flow: DataFlow, count: int = 3) -> DataFlow:
    for index, name in enumerate(flow.layer_gpus):
        flow.layer_gpus[name] = index * count // len(flow.layer_gpus)
    flow.update_flow()
    return flow


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 2, 2, 2), torch.randint(3, (8,))


def _autocast(dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)


@pytest.fixture(scope="module")
def mixed() -> CapturedOnce:
    return CapturedOnce(_Mixed, dtype=torch.float32)


@pytest.mark.covering(every=5)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_under_autocast_and_without_take_turns(
    dtype: torch.dtype, schedule: Order, mixed: CapturedOnce
) -> None:
    model, whole = mixed.model, mixed.reference
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole))
    inputs, target = _batch()
    regions = (dtype, None, dtype)
    with logical_devices(3), mixed.flow() as flow:
        step = _place(flow).train_step(functional.cross_entropy, ours, schedule)
        losses = []
        for region in regions:
            with _autocast(region):
                losses.append(step(inputs, target, chunks=4).cpu())
    for loss, region in zip(losses, regions, strict=True):
        theirs.zero_grad()
        expected = torch.zeros(())
        for part, goal in zip(inputs.chunk(4), target.chunk(4), strict=True):
            with _autocast(region):
                part_loss = functional.cross_entropy(whole(part), goal) / 4
            part_loss.backward()
            expected += part_loss.detach()
        theirs.step()
        torch.testing.assert_close(loss, expected)
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach())


def test_steps_in_one_autocast_region_use_the_weights_that_the_optimizer_left() -> None:
    # Autocast keeps cast weights until its region ends; a pass that used them would not see the
    # optimizer's step.
    torch.manual_seed(0)
    model = _Mixed()
    inputs, target = _batch()
    with logical_devices(3), _autocast(torch.bfloat16):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        step = _flow(model).train_step(functional.cross_entropy, optimizer)
        losses = [float(step(inputs, target, chunks=2)) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def test_float16_with_a_scaler_under_autocast_equals_the_unsplit_model() -> None:
    torch.manual_seed(0)
    model = _Mixed()
    whole = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole))
    one, other = (
        torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1) for _ in range(2)
    )
    inputs, target = _batch()
    with logical_devices(3):
        step = _flow(model).train_step(functional.cross_entropy, ours, scaler=one)
        for _ in range(3):
            with _autocast(torch.float16):
                step(inputs, target, chunks=1)
    for _ in range(3):
        theirs.zero_grad()
        with _autocast(torch.float16):
            loss = functional.cross_entropy(whole(inputs), target)
        other.scale(loss).backward()
        other.step(theirs)
        other.update()
    assert one.get_scale() == other.get_scale()
    for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), its.detach())


class _Noisy(nn.Module):
    """Dropout on two devices; shows which of its inputs were kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.middle, self.two = (
            nn.Linear(4, 4),
            nn.Dropout(0.5),
            nn.Linear(4, 4),
            nn.Dropout(0.5),
        )

    def forward(self, x: Tensor) -> Tensor:
        kept = self.one(1 + 0 * self.first(x))
        return torch.cat([kept, self.two(1 + 0 * self.middle(kept))], 1)


def _masks(seed: int, schedule: Order, steps: int = 2) -> list[Tensor]:
    """What dropout kept in each micro-batch of some steps."""
    seen: list[Tensor] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.detach().cpu().clone())
        return functional.mse_loss(output, target)

    torch.manual_seed(0)
    model = _Noisy()
    with logical_devices(2):
        step = _flow(model, 2).train_step(loss_fn, schedule=schedule)
        step(torch.randn(8, 4), torch.randn(8, 8), chunks=4)
        seen.clear()
        torch.manual_seed(seed)
        for _ in range(steps):
            step(torch.zeros(8, 4), torch.zeros(8, 8), chunks=4)
    return seen


@pytest.mark.covering(every=3, first=2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dropout_differs_between_micro_batches_and_steps_and_a_seed_repeats_it(
    schedule: Order,
) -> None:
    first, again, other = _masks(3, schedule), _masks(3, schedule), _masks(4, schedule)
    assert len(first) == 8
    assert all(not torch.equal(one, two) for i, one in enumerate(first) for two in first[:i])
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert any(not torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_preparing_the_pipeline_draws_no_random_numbers() -> None:
    model = _Noisy()
    torch.manual_seed(5)
    with logical_devices(2):
        step = _flow(model, 2).train_step(functional.mse_loss)
        inputs, target = torch.randn(8, 4), torch.randn(8, 8)
        before = torch.get_rng_state()
        first = step(inputs, target, chunks=4).cpu()
        torch.set_rng_state(before)
        torch.testing.assert_close(step(inputs, target, chunks=4).cpu(), first, atol=0, rtol=0)
