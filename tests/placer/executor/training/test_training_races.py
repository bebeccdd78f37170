"""Whatever the pace of devices and copies, a training step's accesses to every tensor have an order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from races import Races, Site, watched
from small_models import Skips, tokens_loss
from splitting import scatter_layers, twins
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow, devices
from placer.executor.training.pipeline import Order
from placer.testing import logical_devices
from placer.zoo import gpt

ROWS, DEVICES, STEPS = 16, 3, 2


def _skips() -> tuple[nn.Module, Tensor, Tensor, Any]:
    model, _ = twins(Skips)
    return (
        model,
        torch.randn(ROWS, 5, dtype=torch.float64),
        torch.randn(ROWS, 5, dtype=torch.float64),
        functional.mse_loss,
    )


def _tied() -> tuple[nn.Module, Tensor, Tensor, Any]:
    model, _ = twins(lambda: gpt(layers=2, width=8, heads=2, context=4, vocabulary=7, tied=True))
    return model, torch.randint(7, (ROWS, 4)), torch.randint(7, (ROWS, 4)), tokens_loss


def _views() -> tuple[nn.Module, Tensor, Tensor, Any]:
    """The segment in the middle only views what it reads: its results would lie in what it received."""
    model, _ = twins(lambda: nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (2, 3)), nn.Linear(3, 2)))
    inputs, target = torch.randn(ROWS, 6, dtype=torch.float64), torch.randn(ROWS, 2, 2, dtype=torch.float64)
    return model, inputs, target, functional.mse_loss


def _flat() -> tuple[nn.Module, Tensor, Tensor, Any]:
    """The first segment only views the batch, and has nothing to train."""
    model, _ = twins(lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Linear(4, 2)))
    inputs, target = torch.randn(ROWS, 2, 3, dtype=torch.float64), torch.randn(ROWS, 2, dtype=torch.float64)
    return model, inputs, target, functional.mse_loss


MODELS = {"skips": _skips, "tied gpt": _tied, "views": _views, "flat": _flat}


def _train(
    monkeypatch: pytest.MonkeyPatch, name: str, schedule: Order, chunks: int, seed: int | None, deaf: Site | None = None
) -> Races:
    """A caller who writes to all that is his as soon as a step returns: the batch, the gradients and the weights."""
    model, inputs, target, loss_fn = MODELS[name]()
    with logical_devices(DEVICES) as places, watched(monkeypatch, deaf) as races:
        flow = DataFlow(model, fine_grained=True)
        names = list(flow.layer_gpus)
        if seed is None:
            flow.layer_gpus.update({layer: index * DEVICES // len(names) for index, layer in enumerate(names)})
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
                races.run([("caller", devices.location(buffer))], [buffer], [], "the caller's look at a buffer")
    return races


CASES: list[tuple[str, Order, int, int | None]] = [
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
]
"""Model, schedule, micro-batches, and the seed of a map that comes back to devices; of 16 rows, 5 are uneven."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_two_accesses_to_one_tensor_have_an_order(
    case: tuple[str, Order, int, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    races = _train(monkeypatch, *case)
    assert races.found == []
    assert len(races.sites) >= 4


def test_every_place_in_the_code_that_waits_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [CASES[10], CASES[9], CASES[0], CASES[1], CASES[7]]  # the quickest first: one race is enough
    sites = {site for case in cases for site in _train(monkeypatch, *case).sites}
    idle = [site for site in sorted(sites) if not any(_train(monkeypatch, *c, deaf=site).found for c in cases)]
    # A copy runs in the queues of both its devices, so that either's wait for what it reads would do.
    assert [function for function, _ in idle] in ([], ["send_all"])
