"""What a training step does is what its schedule says: the order of passes, what is alive, and
which way values go."""

from __future__ import annotations

import gc

import pytest
import torch
from alive import Alive
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow
from placer.executor.training.training_pipeline import Order
from placer.schema import Placement
from placer.testing import logical_devices

DEVICES, CHUNKS = 4, 8
ONE_F_ONE_B = [
    "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
    "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
    "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
]
"""On three devices, six micro-batches, as the field draws it."""


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Bilinear(4, 4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        result: Tensor = self.third(self.second(hidden), hidden)
        return result


def _skip(schedule: Order) -> DataFlow:
    flow = DataFlow(Skip(), device_ids=3)
    places = {"first": "cpu:0", "second": "cpu:1", "third": "cpu:2"}
    flow.update_flow(
        Placement(
            status="feasible",
            objective="throughput",
            layer_devices=places,
            chunks=6,
            schedule=schedule,
        )
    )
    return flow


def test_the_schedule_that_the_placement_names_is_the_order_of_passes() -> None:
    inputs = torch.randn(6, 4)
    with logical_devices(3):
        flow = _skip("1f1b")
        measured = flow.measure(inputs, inputs, step=flow.train_step(functional.mse_loss)).rows
    for stage, expected in enumerate(ONE_F_ONE_B):
        rows = sorted((row for row in measured if row.stage == stage), key=lambda row: row.start_ms)
        assert " ".join(f"{row.kind[0].upper()}{row.micro_batch}" for row in rows) == expected


def test_a_skip_and_its_gradient_go_straight_between_the_devices_that_make_and_read_it() -> None:
    inputs = torch.randn(6, 4)
    with logical_devices(3):
        flow = _skip("fill-drain")
        measured = flow.measure(inputs, inputs, step=flow.train_step(functional.mse_loss)).measured
    values = [(row.stage, row.target) for row in measured if row.kind == "values"]
    gradients = [(row.stage, row.target) for row in measured if row.kind == "gradients"]
    assert sorted(values) == sorted([(0, 1), (1, 2), (0, 2)] * 6)
    assert sorted(gradients) == sorted([(1, 0), (2, 1), (2, 0)] * 6)


@pytest.mark.parametrize(
    ("schedule", "most"),
    [("fill-drain", DEVICES * CHUNKS), ("1f1b", DEVICES * (DEVICES + 1) // 2)],
)
def test_activations_live_from_the_forward_to_the_backward_pass_of_their_micro_batch(
    schedule: Order, most: int
) -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(DEVICES))
    )
    flow = DataFlow(model, [f"cpu:{index}" for index in range(DEVICES)])
    flow.layer_gpus.update({str(index): index for index in range(DEVICES)})
    flow.update_flow()
    step = flow.train_step(functional.mse_loss, schedule=schedule)
    inputs = torch.randn(CHUNKS, 4)
    step(inputs, inputs, chunks=CHUNKS)
    gc.collect()
    with Alive(torch.ops.aten.tanh.default) as alive:
        step(inputs, inputs, chunks=CHUNKS)
    assert alive.most == most
