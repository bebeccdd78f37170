"""On real GPUs: steps with state on the host equal other steps, and need less memory."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from unverified import unverified

from placer import DataFlow, devices
from placer.executor.training.optimizer import optimizer_update
from placer.executor.training.optimizer.host_state import HostState
from placer.executor.training.optimizer.optimizer_update import Update

pytestmark = pytest.mark.usefixtures("exact")

WIDTH, LAYERS = 512, 6
BUCKET_BYTES = 7 * 2**20
"""The state and the gradient of one layer's weight in float64, which are 6 MiB."""


def _placed() -> DataFlow:
    """As many layers on each GPU."""
    torch.manual_seed(0)
    count = torch.cuda.device_count()
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS * count)]
    flow = DataFlow(nn.Sequential(*layers).double())
    for index, name in enumerate(flow.layer_gpus):
        flow.layer_gpus[name] = index // LAYERS
    flow.update_flow()
    return unverified(flow)


def _batch(number: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(number)
    inputs, target = torch.randn(2, 32, WIDTH, dtype=torch.float64)
    return inputs, target


def _allocated() -> list[int]:
    gc.collect()
    devices.synchronise_all()
    return [*map(torch.cuda.memory_allocated, range(torch.cuda.device_count()))]


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = partial(HostState, bucket_bytes=BUCKET_BYTES)
    monkeypatch.setattr(optimizer_update, "HostState", kept)


@pytest.mark.gpu
@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"capturable": True}])
def test_steps_equal_those_with_state_on_the_devices(options: dict[str, Any]) -> None:
    trained = []
    for place in ("device", "host"):
        flow = _placed()
        optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3, **options)
        step = flow.train_step(functional.mse_loss, optimizer, optimizer_state=place)  # type: ignore[arg-type]
        for number in range(4):
            step(*_batch(number), chunks=4)
        if place == "host":
            moments = [state["exp_avg"] for state in optimizer.state.values()]
            assert all(one.device.type == "cpu" and one.is_pinned() for one in moments)
        state = optimizer.state_dict()["state"]
        trained.append((flow.state_dict(), state))
    (model, state), (other_model, other_state) = trained
    for name, value in model.items():
        torch.testing.assert_close(other_model[name], value, atol=1e-10, rtol=1e-10, msg=name)
    for key, values in state.items():
        for name, value in values.items():
            torch.testing.assert_close(
                other_state[key][name].cpu(), value.cpu(), atol=1e-10, rtol=1e-10
            )


@pytest.mark.gpu
@pytest.mark.usefixtures("small_buckets")
def test_memory_between_steps_is_less_by_the_state_and_a_step_needs_few_buckets() -> None:
    flow = _placed()
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3, foreach=True)
    step = flow.train_step(functional.mse_loss, optimizer)
    for number in range(3):
        step(*_batch(number), chunks=4)
    before = _allocated()
    # the same recorded passes, so that nothing else differs
    step.update = Update(optimizer, optimizer_state="host")
    for number in range(3, 5):
        step(*_batch(number), chunks=4)
    after = _allocated()
    for index in range(torch.cuda.device_count()):
        own = [one for one in flow.parameters() if one.device.index == index]
        moments = 2 * sum(one.numel() * one.element_size() for one in own)
        assert before[index] - after[index] == moments
        torch.cuda.reset_peak_memory_stats(index)
    step.update(flow.module)
    devices.synchronise_all()
    for index in range(torch.cuda.device_count()):
        peak = torch.cuda.max_memory_allocated(index) - after[index]
        # two buffers of state, and the temporaries of one bucket: two tensors for each gradient
        assert 0 < peak <= 3 * BUCKET_BYTES
