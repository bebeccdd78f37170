"""Streams whose segments are recorded, the recording played on the CPU: static memory in, static
memory out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import Skips
from splitting import scatter_layers, twins
from torch import Tensor, nn

from placer import DataFlow, devices
from placer.executor.engine.slot import Slot
from placer.executor.engine.stage import Stage
from placer.testing import logical_devices
from placer.zoo import gpt

WARM_UPS = 3


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Slot]:
    """Every slot that was recorded: what its pass made while it was recorded is where each replay
    writes to."""
    recorded: list[Slot] = []

    def record(self: Stage[Slot]) -> None:
        for slot in self.slots:
            compute = slot.passes["forward"]
            for _ in range(WARM_UPS + 1):
                compute()
            slot.passes["forward"] = _replay(slot, compute, dict(slot.outputs))
            recorded.append(slot)

    monkeypatch.setattr(Stage, "record", record)
    return recorded


def _replay(slot: Slot, compute: Any, static: dict[str, Any]) -> Any:
    memory = {
        name: value.data_ptr() for name, value in slot.inputs.items() if isinstance(value, Tensor)
    }

    def replay() -> None:
        assert {name: slot.inputs[name].data_ptr() for name in memory} == memory
        compute()
        for name, value in slot.outputs.items():
            if isinstance(value, Tensor):
                static[name].copy_(value)
        slot.outputs = static

    return replay


def _compare(model: nn.Module, whole: nn.Module, batches: list[Tensor], seed: int) -> None:
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 3, seed)
        results = list(flow.stream(batches))
    with torch.no_grad():
        for result, batch in zip(results, batches, strict=True):
            torch.testing.assert_close(result.cpu(), whole(batch), atol=1e-10, rtol=1e-10)


class _Views(nn.Module):
    """Layers that return what they read, and views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.same, self.flat, self.last = (
            nn.Linear(4, 6),
            nn.Dropout(),
            nn.Flatten(),
            nn.Linear(12, 3),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.same(self.first(x))
        z = self.flat(y)
        return self.last(z) + y.sum(), y.transpose(1, 2), z[:, ::2]


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("seed", range(3))
def test_skips_and_changing_shapes(seed: int, recordings: list[Slot]) -> None:
    model, whole = twins(Skips, training=False)
    _compare(
        model,
        whole,
        [torch.randn(rows, 5, dtype=torch.float64) for rows in [4, 4, 4, 3, 4, 3, 4, 4, 3, 4]],
        seed,
    )
    assert len(recordings) > 4


@pytest.mark.parametrize("seed", range(3))
def test_views_of_static_memory(seed: int, recordings: list[Slot]) -> None:
    model, whole = twins(_Views, training=False)
    batches = [torch.randn(3, 2, 4, dtype=torch.float64) for _ in range(8)]
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 3, seed)
        results = list(flow.stream(batches))
    assert recordings
    with torch.no_grad():
        for result, batch in zip(results, batches, strict=True):
            for ours, theirs in zip(result, whole(batch), strict=True):
                torch.testing.assert_close(ours.cpu(), theirs, atol=1e-10, rtol=1e-10)


def test_a_tied_weight(recordings: list[Slot]) -> None:
    model, whole = twins(
        lambda: gpt(layers=2, width=8, heads=2, context=4, vocabulary=9, tied=True), training=False
    )
    _compare(model, whole, [torch.randint(9, (2, 4)) for _ in range(8)], 1)
    assert recordings


def test_what_recording_runs_leaves_running_statistics_and_random_numbers_alone(
    recordings: list[Slot],
) -> None:
    model, whole = twins(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    )
    batches = [torch.randn(2, 3, 8, 8, dtype=torch.float64) for _ in range(4)]
    torch.manual_seed(5)
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update({"1": 1, "2": 0})
        flow.update_flow()
        results = list(flow.stream(batches, in_flight=1))
    assert recordings
    torch.manual_seed(5)
    with torch.no_grad():
        for result, batch in zip(results, batches, strict=True):
            torch.testing.assert_close(result.cpu(), whole(batch), atol=1e-10, rtol=1e-10)
    for name, buffer in whole.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name].cpu(), buffer, msg=name)


def test_recorded_slots_share_no_memory_as_each_is_read_while_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together: list[int] = []

    def record(passes: list[Any], device: torch.device) -> list[Any]:
        # those of one call have their memory in common
        together.append(len(passes))
        return passes

    monkeypatch.setattr(devices, "record", record)
    segment: Any = SimpleNamespace(device=torch.device("cuda", 0), steps=())
    stage = Stage[Slot](segment, (), {})
    stage.slots = [Slot(passes={"forward": lambda: None}) for _ in range(3)]
    stage.record()
    assert together == [1, 1, 1]
