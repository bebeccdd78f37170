"""Layers of one device together: a placement with branches is one stage a device, and trains as the
unsplit model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow
from placer.capture.capture import capture_graph
from placer.executor.engine.segment_order import stage_by_stage
from placer.executor.training.training_pipeline import Order
from placer.testing import logical_devices


class _Branches(nn.Module):
    """Two branches whose layers run in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.left1, self.left2 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.right1, self.right2 = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        left, right = self.left1(x), self.right1(x)
        left, right = self.left2(left), self.right2(right)
        result: Tensor = self.head(left * right)
        return result


def _trained(model: nn.Module, places: dict[str, int], schedule: Order) -> tuple[int, nn.Module]:
    """How many stages there are, and the model after two steps."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    whole = copy.deepcopy(model)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for part, goal in zip(x.chunk(4), y.chunk(4), strict=True):
            (functional.mse_loss(whole(part), goal) / 4).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with logical_devices(3):
        flow = DataFlow(model)
        flow.layer_gpus.update(places)
        flow.update_flow()
        step = flow.train_step(
            functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), schedule=schedule
        )
        for _ in range(2):
            step(x, y, chunks=4)
        stages = len(step.pipelines[0].stages)
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(
                model.state_dict()[name].cpu(), value, atol=1e-10, rtol=1e-10, msg=name
            )
    return stages, model


@pytest.mark.covering(every=2, first=1)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "fill-drain", "interleaved"])
def test_branches_on_two_devices_are_a_stage_each(schedule: Order) -> None:
    torch.manual_seed(1)
    places = {"stem": 0, "left1": 0, "left2": 0, "right1": 1, "right2": 1, "head": 2}
    assert _trained(_Branches().double(), places, schedule)[0] == 3


def test_branches_on_two_devices_are_a_stage_each_in_calls_and_streams_too() -> None:
    torch.manual_seed(1)
    model, x = _Branches().double(), torch.randn(8, 4, dtype=torch.float64)
    wanted = model(x)
    wanted.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    with logical_devices(3):
        flow = DataFlow(model)
        flow.layer_gpus.update(
            {"stem": 0, "left1": 0, "left2": 0, "right1": 1, "right2": 1, "head": 2}
        )
        flow.update_flow()
        found = flow(x, chunks=4)
        found.sum().backward()
        streamed = torch.cat(list(flow.stream(x.split(2))))
        measured = flow.measure(x, chunks=4)
    torch.testing.assert_close(found.cpu(), wanted)
    torch.testing.assert_close(streamed.cpu(), wanted)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.cpu(), gradients[name])
    assert {row.stage for row in measured.measured if row.kind == "forward"} == {0, 1, 2}


def test_a_device_that_is_left_and_come_back_to_keeps_its_segments() -> None:
    torch.manual_seed(1)
    places = {"stem": 0, "left1": 1, "left2": 1, "right1": 1, "right2": 1, "head": 0}
    assert _trained(_Branches().double(), places, "1f1b")[0] == 3


def test_every_layer_still_runs_after_those_that_it_needs() -> None:
    graph = capture_graph(_Branches(), (torch.randn(2, 4),))
    place = {"stem": 0, "left1": 1, "left2": 1, "right1": 2, "right2": 2, "head": 2}
    places = [torch.device("cpu", place[layer.name]) for layer in graph.layers]
    ordered, found = stage_by_stage(graph, places)
    assert [device.index for device in found] == [0, 1, 1, 2, 2, 2]
    assert [layer.name for layer in ordered.layers] == [
        "stem",
        "left1",
        "left2",
        "right1",
        "right2",
        "head",
    ]
    there = set(graph.inputs)
    for layer in ordered.layers:
        assert there.issuperset(layer.reads)
        there.update(layer.writes)
