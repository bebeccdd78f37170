"""Whatever the pace of devices and copies, a training step's accesses to every tensor have an
order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from races import Races, Site, watched
from replicated import by_stage
from small_models import Skips, tokens_loss
from splitting import CapturedOnce, scatter_layers
from torch import Tensor, nn
from torch.nn import functional

from placer import devices
from placer.executor.training.training_pipeline import Order
from placer.testing import logical_devices
from placer.zoo import gpt

ROWS, DEVICES, STEPS = 16, 3, 3


def _skips() -> tuple[Tensor, Tensor, Any]:
    inputs, target = (torch.randn(ROWS, 5, dtype=torch.float64) for _ in range(2))
    return inputs, target, functional.mse_loss


def _tied_gpt() -> nn.Module:
    return gpt(layers=2, width=8, heads=2, context=4, vocabulary=7, tied=True)


def _tied() -> tuple[Tensor, Tensor, Any]:
    return torch.randint(7, (ROWS, 4)), torch.randint(7, (ROWS, 4)), tokens_loss


def _viewing() -> nn.Module:
    """The segment in the middle only views what it reads: its results would lie in what it
    received."""
    return nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (2, 3)), nn.Linear(3, 2))


def _views() -> tuple[Tensor, Tensor, Any]:
    inputs, target = (
        torch.randn(ROWS, 6, dtype=torch.float64),
        torch.randn(ROWS, 2, 2, dtype=torch.float64),
    )
    return inputs, target, functional.mse_loss


def _flattening() -> nn.Module:
    """The first segment only views the batch, and has nothing to train."""
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Linear(4, 2))


def _flat() -> tuple[Tensor, Tensor, Any]:
    inputs, target = (
        torch.randn(ROWS, 2, 3, dtype=torch.float64),
        torch.randn(ROWS, 2, dtype=torch.float64),
    )
    return inputs, target, functional.mse_loss


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor, Any]]]] = {
    "skips": (Skips, _skips),
    "tied gpt": (_tied_gpt, _tied),
    "views": (_viewing, _views),
    "flat": (_flattening, _flat),
}

Kept = Callable[[str], CapturedOnce]


@pytest.fixture(scope="module")
def kept() -> Kept:
    """A model by its name."""
    return cache(lambda name: CapturedOnce(MODELS[name][0]))


def _train(
    kept: Kept,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    schedule: Order,
    chunks: int,
    seed: int | None,
    counts: tuple[int, ...] = (),
    deaf: Site | None = None,
) -> Races:
    """A caller who writes to all that is his as soon as a step returns: the batch, the gradients
    and the weights."""
    (inputs, target, loss_fn), both = MODELS[name][1](), kept(name)
    with (
        logical_devices(sum(counts) or DEVICES) as places,
        both.flow(fine_grained=True) as flow,
        watched(monkeypatch, deaf) as races,
    ):
        model = both.model
        names = list(flow.layer_gpus)
        if counts:
            flow.update_flow(by_stage(model, counts))
        elif seed is None:
            flow.layer_gpus.update(
                {layer: index * DEVICES // len(names) for index, layer in enumerate(names)}
            )
            flow.update_flow()
        else:
            scatter_layers(flow, DEVICES, seed)
        inputs, target = devices.copy(inputs, places[0]), devices.copy(target, places[0])
        step = flow.train_step(loss_fn, schedule=schedule)
        for _ in range(STEPS):
            races.run([("caller", places[0])], [], [inputs, target], "the caller's batch")
            loss = step(inputs, target, chunks=chunks)
            assert loss.isfinite()
            races.run([("caller", places[0])], [], [inputs, target], "the caller's next batch")
            for parameter in model.parameters():
                queue = ("caller", devices.location(parameter))
                races.run([queue], [], [parameter.grad], "the caller's clipping")
                races.run([queue], [parameter.grad], [parameter], "the optimizer")
            for buffer in model.buffers():
                races.run(
                    [("caller", devices.location(buffer))],
                    [buffer],
                    [],
                    "the caller's look at a buffer",
                )
    return races


CASES: list[tuple[str, Order, int, int | None] | tuple[str, Order, int, None, tuple[int, ...]]] = [
    ("skips", "1f1b", 8, None),
    ("skips", "zero-bubble", 8, None),
    ("skips", "zero-bubble", 5, None),
    ("skips", "fill-drain", 8, 0),
    ("skips", "interleaved", 8, 0),
    ("tied gpt", "zero-bubble", 8, None),
    ("tied gpt", "1f1b", 5, None),
    ("tied gpt", "fill-drain", 8, 0),
    ("views", "1f1b", 8, None),
    ("flat", "1f1b", 8, None),
    ("flat", "1f1b", 2, None),
    ("skips", "1f1b", 1, None, (4,)),
    ("skips", "zero-bubble", 3, None, (2, 2)),
    ("tied gpt", "1f1b", 2, None, (4,)),
    ("tied gpt", "1f1b", 2, None, (2, 2)),
    ("skips", "1f1b", 3, None, (2, 1)),
    ("skips", "zero-bubble", 2, None, (1, 3)),
    ("tied gpt", "1f1b", 1, None, (2, 3)),
    ("tied gpt", "fill-drain", 2, None, (1, 2, 1)),
]
"""Model, schedule, micro-batches, the seed of a map that comes back to devices, and the number of
replicas of each stage; of 16 rows, 5 are uneven."""


@pytest.mark.covering(every=4, first=1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_two_accesses_to_one_tensor_have_an_order(
    case: Any, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    races = _train(kept, monkeypatch, *case)
    assert races.found == []
    assert len(races.sites) >= 4


@pytest.mark.exhaustive
def test_every_place_in_the_code_that_waits_is_needed(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [
        CASES[10],
        CASES[9],
        CASES[0],
        CASES[1],
        CASES[7],
        CASES[11],
        CASES[14],
    ]  # the quickest first: one race is enough
    sites = {site for case in cases for site in _train(kept, monkeypatch, *case).sites}
    idle = [
        site
        for site in sorted(sites)
        if not any(_train(kept, monkeypatch, *c, deaf=site).found for c in cases)
    ]
    # A copy runs in the queues of both its devices, so that either's wait for what it reads would
    # do.
    assert [function for function, _ in idle] in ([], ["send_all"])
