"""On real GPUs: what a user may do while steps are still under way."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow

_STEPS = 3
_ASLEEP_CYCLES = 400_000_000
"""About 0.2 s, in which nothing that was issued begins."""


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target)


@pytest.mark.gpu
def test_the_allocators_cache_may_be_emptied_while_steps_are_under_way() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    # On the first device, 33 MB each: what a device does not read where it lies is brought there
    # whole.
    inputs, target = (
        torch.randn(64, 3, 256, 256, device="cuda:0"),
        torch.randint(4, (64, 256, 256), device="cuda:0"),
    )
    expected = _unsplit_losses(copy.deepcopy(model).to("cuda:0"), inputs, target)
    flow = DataFlow(model, ["cuda:0", "cuda:1"])
    flow.layer_gpus.update({"0": "cuda:0", "1": "cuda:1", "2": "cuda:1"})
    flow.update_flow()
    step = flow.train_step(
        _loss, torch.optim.SGD(flow.parameters(), lr=0.1), schedule="zero-bubble"
    )
    losses = []
    for _ in range(_STEPS):
        for index in range(2):
            with torch.cuda.device(index):
                torch.cuda._sleep(_ASLEEP_CYCLES)  # type: ignore[no-untyped-call]
        losses.append(step(inputs, target, chunks=4))
        gc.collect()
        torch.cuda.empty_cache()
    assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-3)
    flow.undo()


def _unsplit_losses(model: nn.Module, inputs: Tensor, target: Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss = _loss(model(inputs), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.gpu
def test_memory_may_be_freed_right_after_weights_have_moved() -> None:
    """Torch frees memory into which another device still copies:
    https://github.com/pytorch/pytorch/issues/196257"""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096)).to("cuda:0")
    before = model[1].weight.detach().cpu()
    flow = DataFlow(model, ["cuda:0", "cuda:1"])
    flow.layer_gpus.update({"0": "cuda:0", "1": "cuda:1"})
    for _ in range(2):
        _sleep_and_free(flow.update_flow, model)
        flow(torch.ones(8, 4096)).sum().backward()
        _sleep_and_free(flow.undo, model)
        flow.layer_gpus.update({"0": "cuda:0", "1": "cuda:1"})
    assert torch.equal(model[1].weight.detach().cpu(), before)


def _sleep_and_free(move: Callable[[], None], model: nn.Module) -> None:
    """Move weights while the devices sleep, and free all memory of gradients."""
    for index in range(2):
        with torch.cuda.device(index):
            torch.cuda._sleep(_ASLEEP_CYCLES)  # type: ignore[no-untyped-call]
    move()
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
