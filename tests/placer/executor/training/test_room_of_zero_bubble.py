"""Zero-bubble in whatever room its stages have trains as the unsplit model, and holds no more than
that."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rows import row
from splitting import CapturedOnce
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow
from placer.executor.training.train_step import TrainStep
from placer.executor.training.training_pipeline import TrainingPipeline
from placer.schema import Constraints, Placement
from placer.solver.solve import solve
from placer.testing import logical_devices

STAGES, CHUNKS = 4, 6
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
SOLVED = {"devices": STAGES, "saved_bytes": 10, "grad_bytes": 1, "chunks": CHUNKS}
ROOMS = [
    (4, 3, 2, 1),
    (4, 4, 4, 4),
    (5, 4, 3, 2),
    (6, 5, 4, 3),
    (6, 6, 6, 6),
    (1, 1, 1, 1),
    (2, 6, 1, 3),
]


class _Block(nn.Module):
    """Both kinds of layers whose weight gradients can wait."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.conv = nn.Linear(6, 6), nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.conv(torch.tanh(self.mix(x)))
        return result


def _model() -> nn.Sequential:
    return nn.Sequential(OrderedDict((f"l{i}", _Block()) for i in range(STAGES)))


def _data(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 2, 6, dtype=torch.float64), torch.randn(
        size, 2, 6, dtype=torch.float64
    )


@pytest.fixture(scope="module")
def captured_once() -> CapturedOnce:
    return CapturedOnce(_model)


@pytest.fixture
def places() -> Iterator[list[str]]:
    with logical_devices(STAGES) as found:
        yield list(map(str, found))


@pytest.fixture
def flow(captured_once: CapturedOnce, places: list[str]) -> Iterator[DataFlow]:
    """A flow of four stages of a layer each."""
    with captured_once.flow(device_ids=places) as found:
        found.layer_gpus.update({f"l{i}": place for i, place in enumerate(places)})
        found.update_flow()
        yield found


def _check(step: TrainStep, flow: DataFlow, size: int, chunks: int) -> TrainingPipeline:
    """Hold losses and gradients of several steps against the unsplit model, and what each stage
    holds at once."""
    whole = copy.deepcopy(flow.module).to("cpu")
    ours, theirs = dict(flow.module.named_parameters()), dict(whole.named_parameters())
    for _ in range(2):
        inputs, target = _data(size)
        for known in step.pipelines:
            known.engine.trace = []
        loss = step(inputs, target, chunks=chunks)
        whole.zero_grad()
        expected = functional.mse_loss(whole(inputs), target)
        expected.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(loss.cpu(), expected.detach(), **TOLERANCE)
        for name, parameter in theirs.items():
            torch.testing.assert_close(
                ours[name].grad, parameter.grad, check_device=False, **TOLERANCE
            )
    (pipeline,) = step.pipelines
    assert pipeline.engine.trace is not None
    held, last = [0] * STAGES, "weights" if pipeline.plan.split else "backward"
    for issued in pipeline.engine.trace:
        held[issued.stage] += (issued.phase == "forward") - (issued.phase == last)
        assert held[issued.stage] <= pipeline.plan.in_flight[issued.stage]
    assert held == [0] * STAGES
    return pipeline


@pytest.mark.covering(every=7)
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("size", [12, 11], ids=["even", "uneven"])
def test_losses_and_gradients_are_those_of_the_unsplit_model_in_every_room(
    room: tuple[int, ...], size: int, flow: DataFlow
) -> None:
    flow.in_flight = room
    pipeline = _check(
        flow.train_step(functional.mse_loss, schedule="zero-bubble"), flow, size, CHUNKS
    )
    assert pipeline.plan.split and pipeline.plan.in_flight == room
    # the last one, if it is smaller, has a slot of its own
    equal = pipeline.sizes.count(pipeline.sizes[0])
    assert equal == (CHUNKS if size % CHUNKS == 0 else len(pipeline.sizes) - 1)
    slots = [min(held, equal) for held in room]
    assert [len(stage.slots) for stage in pipeline.stages] == slots
    assert [stage.memories for stage in pipeline.stages] == [
        pipeline.plan.backward_memory(index)[:count] for index, count in enumerate(slots)
    ]


def test_without_a_room_each_stage_holds_as_many_as_it_has_a_use_for(flow: DataFlow) -> None:
    pipeline = _check(flow.train_step(functional.mse_loss, schedule="zero-bubble"), flow, 24, 12)
    assert pipeline.plan.in_flight == (8, 8, 8, 8)


def test_another_number_of_micro_batches_has_no_more_room_than_there_are(flow: DataFlow) -> None:
    flow.in_flight = (4, 4, 4, 4)
    pipeline = _check(flow.train_step(functional.mse_loss, schedule="zero-bubble"), flow, 6, 3)
    assert [len(stage.slots) for stage in pipeline.stages] == [3] * STAGES


def test_stages_that_recompute_have_the_room_of_their_placement(
    flow: DataFlow, places: list[str]
) -> None:
    flow.in_flight, flow.recompute = (4, 3, 3, 2), [places[0], places[2]]
    pipeline = _check(
        flow.train_step(functional.mse_loss, schedule="zero-bubble"), flow, 12, CHUNKS
    )
    assert [len(stage.slots) for stage in pipeline.stages] == [4, 3, 3, 2]


def _solved(objective: str, memory_bytes: int) -> Placement:
    rules = Constraints(contiguous=True, min_devices=STAGES)
    asked: dict[str, Any] = SOLVED | {"schedule": "zero-bubble", "constraints": rules}
    request = row([1.0] * STAGES, memory_bytes=memory_bytes, **asked)
    return solve(request.model_copy(update={"objective": objective}))


@pytest.mark.covering
@pytest.mark.parametrize("objective", ["step", "throughput"])
@pytest.mark.parametrize(
    ("memory_bytes", "room"),
    [
        (51, (4, 3, 3, 4)),
        (60, (4, 4, 4, 5)),
        pytest.param(10_000, (6, 6, 6, 6), marks=pytest.mark.exhaustive),
    ],
)
def test_a_step_runs_in_the_room_that_its_placement_reckoned_with(
    objective: str, memory_bytes: int, room: tuple[int, ...], flow: DataFlow, places: list[str]
) -> None:
    # as it comes from a file
    placement = Placement.model_validate_json(_solved(objective, memory_bytes).to_json())
    assert placement.in_flight == room
    names = dict(zip(placement.stages, places, strict=True))
    where = {layer: names[device] for layer, device in placement.layer_devices.items()}
    flow.update_flow(placement.model_copy(update={"layer_devices": where}))
    assert (flow.schedule, flow.in_flight) == ("zero-bubble", room)
    pipeline = _check(flow.train_step(functional.mse_loss), flow, 12, CHUNKS)
    assert pipeline.plan.in_flight == room
    # Another schedule takes what it needs, and not what was reckoned for this one.
    plain = _check(flow.train_step(functional.mse_loss, schedule="1f1b"), flow, 12, CHUNKS)
    assert plain.plan.in_flight == (4, 3, 2, 1)


def test_a_placement_of_before_rooms_were_chosen_runs_as_it_ran(
    flow: DataFlow, places: list[str]
) -> None:
    """It says under objective ``step`` alone what is in flight, and of zero-bubble as many as there
    is a use for."""
    placement = _solved("step", 10_000)
    fields = placement.model_dump(exclude={"in_flight"})
    names = dict(zip(placement.stages, places, strict=True))
    fields["layer_devices"] = {
        layer: names[device] for layer, device in placement.layer_devices.items()
    }
    flow.update_flow(fields)
    assert flow.in_flight == (6, 6, 6, 6)
    flow.update_flow(fields | {"step": None})
    assert flow.in_flight == ()
