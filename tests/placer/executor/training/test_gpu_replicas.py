"""On real GPUs: replicated stages, recorded, train as the unsplit model over the same parts."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_cases import training_case
from replicated import by_stage, replicated, unsplit_loss
from torch import Tensor, nn
from torch.nn import functional
from unverified import unverified

from placer import DataFlow
from placer.executor.training.train_step import TrainStep
from placer.executor.training.training_pipeline import Order
from placer.schema import Placement, Replica

pytestmark = pytest.mark.usefixtures("exact")

STEPS, SAMPLES = 4, 16


def _require(gpus: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")


def _compare(name: str, replicas: int, stages: int, chunks: int, schedule: Order) -> TrainStep:
    """Train a model by a placement and its copy on one GPU; return the step."""
    _require(replicas * stages)
    fields: Any = {"kind": "cuda", "chunks": chunks, "schedule": schedule}
    return _train(name, lambda model: replicated(model, replicas, stages, **fields))


def _train(name: str, placement_of: Callable[[nn.Module], Placement]) -> TrainStep:
    """Train a model by its placement and its copy on one GPU; return the step."""
    model, inputs, target, loss_fn = training_case(name, SAMPLES)
    whole = copy.deepcopy(model).cuda(0)
    ours, theirs = (torch.optim.Adam(one.parameters(), lr=1e-3) for one in (model, whole))
    flow = unverified(DataFlow(model))
    flow.update_flow(placement_of(model))
    step = flow.train_step(loss_fn, ours)
    for _ in range(STEPS):
        loss = step(inputs, target)
        theirs.zero_grad()
        sizes = step.pipelines[-1].sizes
        expected = unsplit_loss(whole, loss_fn, inputs.cuda(0), target.cuda(0), sizes)
        theirs.step()
        torch.testing.assert_close(loss.cpu().double(), expected, atol=1e-8, rtol=1e-8)
    for (key, mine), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), other.cpu(), atol=1e-7, rtol=1e-7, msg=key)
    (pipeline,) = step.pipelines
    on_gpus = [stage for stage in pipeline.stages if stage.device.type == "cuda"]
    assert all(stage.is_recorded for stage in on_gpus), step.not_recorded_because
    return step


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("name", ["resnet18", "tied gpt"])
def test_two_replicas_train_as_the_unsplit_model(name: str, chunks: int) -> None:
    step = _compare(name, 2, 1, chunks, "1f1b")
    (pipeline,) = step.pipelines
    # the pieces of a stage hand values on without copies
    joined = [(stage, name) for stage in pipeline.stages for name in stage.joined]
    assert joined
    for stage, value in joined:
        maker = stage.joined[value]
        for slot, source in zip(stage.all_slots(), maker.all_slots(), strict=True):
            made = source.outputs[value]
            if isinstance(made, Tensor):
                assert slot.inputs[value].data_ptr() == made.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["resnet18", "unet", "tied gpt"])
@pytest.mark.parametrize(
    ("replicas", "stages", "schedule"),
    [(4, 1, "1f1b"), (2, 2, "1f1b"), (2, 2, "zero-bubble"), (2, 2, "fill-drain")],
)
def test_four_gpus_train_as_the_unsplit_model(
    name: str, replicas: int, stages: int, schedule: Order
) -> None:
    _compare(name, replicas, stages, 2, schedule)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("schedule", "again"),
    [("1f1b", False), ("1f1b", True), ("zero-bubble", False), ("fill-drain", False)],
)
@pytest.mark.parametrize(
    ("counts", "devices"),
    [
        # the second stage, on one device, computes the units of both replicas of the first
        ((2, 1), ("cuda:0", "cuda:1", "cpu:0")),
        ((2, 1), ("cuda:0", "cpu:0", "cuda:1")),
        ((1, 2), ("cuda:0", "cpu:0", "cuda:1")),
        ((2, 1), ("cuda:0", "cuda:1", "cuda:2")),
        ((1, 2, 1), ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
    ],
)
def test_stages_with_numbers_of_replicas_of_their_own_train_as_the_unsplit_model(
    counts: tuple[int, ...], devices: tuple[str, ...], schedule: Order, again: bool
) -> None:
    _require(sum(name.startswith("cuda") for name in devices))
    recompute = devices if again else ()
    fields: Any = {"chunks": 2, "schedule": schedule, "recompute": recompute}
    step = _train("tied gpt", lambda model: by_stage(model, counts, devices, **fields))
    (pipeline,) = step.pipelines
    assert {str(stage.device) for stage in pipeline.stages} == {*devices}


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_units_of_several_sizes_share_a_recorded_stage(schedule: Order) -> None:
    _require(2)
    model, inputs, target, loss_fn = training_case("resnet18", 24)
    whole = copy.deepcopy(model).cuda(0)
    placement = by_stage(model, (2, 1), ("cuda:0", "cpu:0", "cuda:1"), chunks=2, schedule=schedule)
    shares = tuple(
        Replica(device=name, samples=samples) for name, samples in (("cuda:0", 3), ("cpu:0", 1))
    )
    flow = unverified(DataFlow(model))
    changed = {"replicas": {"cuda:0": shares}, "batch_size": 4}
    flow.update_flow(placement.model_copy(update=changed))
    step = flow.train_step(loss_fn)
    for samples in (24, 24, 20, 20, 24):
        step(inputs[:samples], target[:samples])
        whole.zero_grad()
        sizes = step.pipelines[-1].sizes
        unsplit_loss(whole, loss_fn, inputs[:samples].cuda(0), target[:samples].cuda(0), sizes)
        for (key, mine), other in zip(model.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(
                mine.grad.cpu(), other.grad.cpu(), atol=1e-7, rtol=1e-7, msg=key
            )
    for one in step.pipelines:
        assert all(stage.is_recorded for stage in one.stages if stage.device.type == "cuda")


@pytest.mark.gpu
def test_calls_and_streams_use_the_replicas_of_every_stage() -> None:
    _require(2)
    model, inputs, _, _ = training_case("tied gpt", SAMPLES)
    whole = copy.deepcopy(model).eval().cuda(0)
    flow = DataFlow(model.eval())
    flow.update_flow(by_stage(model, (2, 1), ("cuda:0", "cpu:0", "cuda:1"), chunks=2))
    with torch.no_grad():
        expected = whole(inputs.cuda(0)).cpu()
        for _ in range(3):  # eagerly, recorded, and replayed
            torch.testing.assert_close(flow(inputs).cpu(), expected, atol=1e-8, rtol=1e-8)
    found = torch.cat([one.cpu() for one in flow.stream(inputs.split(1))])
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-8)
    places = {str(pipeline.place) for pipeline in flow.calls.streams.pipelines()}
    assert places == {"cuda:0", "cpu:0"}


@pytest.mark.gpu
def test_uneven_shares_and_smaller_batches_are_recorded_too() -> None:
    _require(2)
    model, inputs, target, loss_fn = training_case("resnet18", 24)
    flow = unverified(DataFlow(model))
    flow.update_flow(replicated(model, 2, kind="cuda", samples=(3, 1), chunks=2))
    whole = copy.deepcopy(model).cuda(0)
    for parameter in whole.parameters():
        parameter.grad = None
    step = flow.train_step(loss_fn)
    for samples in (24, 24, 20, 20, 24):
        step(inputs[:samples], target[:samples])
        whole.zero_grad()
        sizes = step.pipelines[-1].sizes
        unsplit_loss(whole, loss_fn, inputs[:samples].cuda(0), target[:samples].cuda(0), sizes)
        for (key, mine), other in zip(model.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(
                mine.grad.cpu(), other.grad.cpu(), atol=1e-7, rtol=1e-7, msg=key
            )
    assert all(stage.is_recorded for one in step.pipelines for stage in one.stages)


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("recompute", [False, True])
def test_replicas_draw_random_numbers_of_their_own(recompute: bool) -> None:
    _require(2)
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5))
    fields: dict[str, Any] = {"recompute": ("cuda:0",)} if recompute else {}
    flow = unverified(DataFlow(model))
    flow.update_flow(replicated(model, 2, kind="cuda", **fields))
    step = flow.train_step(functional.mse_loss)
    x, target = torch.randn(1, 32).repeat(8, 1), torch.zeros(8, 64)
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        for _ in range(3):
            _, result = step(x, target, outputs=True)
            results.append(result.cpu().clone())
            first, second = (part == 0 for part in result.cpu().chunk(2))
            assert not torch.equal(first, second)
    # the same seed gives the same numbers
    for one, other in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("name", ["resnet18", "tied gpt"])
def test_calls_and_streams_without_gradients_use_both_replicas(name: str) -> None:
    _require(2)
    model, inputs, _, _ = training_case(name, SAMPLES)
    whole = copy.deepcopy(model).eval().cuda(0)
    flow = DataFlow(model.eval())
    flow.update_flow(replicated(model, 2, kind="cuda", samples=(3, 1), chunks=2))
    with torch.no_grad():
        expected = whole(inputs.cuda(0)).cpu()
        for _ in range(3):  # eagerly, recorded, and replayed
            torch.testing.assert_close(flow(inputs).cpu(), expected, atol=1e-8, rtol=1e-8)
    found = torch.cat([one.cpu() for one in flow.stream(inputs.split(1))])
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-8)
    places = {str(pipeline.place) for pipeline in flow.calls.streams.pipelines()}
    assert places == {"cuda:0", "cuda:1"}


@pytest.mark.gpu
def test_undo_frees_the_replicas() -> None:
    _require(2)
    # 512 MB, so that the workspaces of libraries, which stay, do not count
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)))
    size = sum(parameter.nbytes for parameter in model.parameters())
    flow = unverified(DataFlow(model))
    flow.update_flow(replicated(model, 2, kind="cuda"))
    step = flow.train_step(functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        step(torch.randn(8, 4096), torch.randn(8, 4096))
    during = torch.cuda.memory_allocated(1)
    del step
    flow.undo()
    model.zero_grad()
    gc.collect()
    # parameters or their copies, and gradients
    assert during - torch.cuda.memory_allocated(1) > 1.9 * size
