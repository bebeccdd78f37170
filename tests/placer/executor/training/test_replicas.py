"""A training step of replicated stages equals the unsplit model's over the same parts."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from math import lcm
from typing import Any

import pytest
import torch
from replicated import by_stage, replicated, unsplit_loss
from torch import Tensor, nn
from torch.nn import functional
from unverified import unverified

from placer import DataFlow
from placer.executor.engine.shares import part_sizes
from placer.executor.state.replication import Replication
from placer.executor.training.train_step import TrainStep
from placer.schedule import plan
from placer.schema import Placement, Replica
from placer.testing import logical_devices

SAMPLES, STEPS = 8, 3


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 6),
        nn.Tanh(),
        nn.Linear(6, 3),
    )
    return model.double()


def _data(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 5).double(), torch.randint(3, (samples,))


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _sizes(placement: Placement, samples: int) -> list[int]:
    devices = Replication.from_placement(placement, torch.device)
    return part_sizes(devices, placement.chunks, samples)


@pytest.fixture
def four() -> Iterator[list[torch.device]]:
    with logical_devices(4) as places:
        yield places


def _compare(
    placement: Placement,
    samples: int = SAMPLES,
    optimizer: Callable[[Any], torch.optim.Optimizer] = _sgd,
    make: Callable[[], nn.Module] = _model,
    data: Callable[[int], tuple[Tensor, Tensor]] = _data,
    loss_fn: Any = functional.cross_entropy,
    **options: Any,
) -> TrainStep:
    """Train a model by a placement and its copy unsplit, and compare them; return the step."""
    model = make()
    whole, (inputs, target) = copy.deepcopy(model), data(samples)
    theirs = optimizer(whole.parameters())
    sizes = _sizes(placement, samples)
    flow = DataFlow(model)
    flow.update_flow(placement)
    unverified(flow)
    step = flow.train_step(loss_fn, optimizer(model.parameters()), **options)
    for _ in range(STEPS):
        loss = step(inputs, target)
        theirs.zero_grad()
        expected = unsplit_loss(whole, loss_fn, inputs, target, sizes)
        torch.testing.assert_close(loss.cpu().double(), expected, atol=1e-10, rtol=1e-10)
        for (name, mine), other in zip(model.named_parameters(), whole.parameters(), strict=True):
            gradient = None if mine.grad is None else mine.grad.cpu()
            torch.testing.assert_close(gradient, other.grad, atol=1e-10, rtol=1e-10, msg=name)
        theirs.step()
    for name, value in whole.state_dict().items():
        found = model.state_dict()[name].cpu()
        torch.testing.assert_close(found, value, atol=1e-10, rtol=1e-10, msg=name)
    return step


@pytest.mark.covering
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(("replicas", "stages"), [(4, 1), (2, 2), (2, 1)])
@pytest.mark.usefixtures("four")
def test_gradients_equal_the_unsplit_models(replicas: int, stages: int, chunks: int) -> None:
    _compare(replicated(_model(), replicas, stages, chunks=chunks), samples=12)


@pytest.mark.parametrize(
    "schedule",
    [pytest.param("fill-drain", marks=pytest.mark.exhaustive), "zero-bubble", "interleaved"],
)
@pytest.mark.usefixtures("four")
def test_every_schedule_works_with_replicas(schedule: Any) -> None:
    _compare(replicated(_model(), 2, 2, chunks=4, schedule=schedule))


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(
    ("samples", "sizes"),
    [
        (16, (6, 2, 6, 2)),
        (14, (5, 2, 5, 2)),
        (15, (6, 2, 5, 2)),  # the last micro-batch is smaller
        (8, (2, 2, 2, 2)),  # forward does something else with a single sample, as 3 + 1 have it
    ],
)
@pytest.mark.usefixtures("four")
def test_shares_may_be_uneven_and_so_may_the_last_batch(
    samples: int, sizes: tuple[int, ...]
) -> None:
    placement = replicated(_model(), 2, 2, samples=(3, 1), chunks=2)
    step = _compare(placement, samples=samples)
    (pipeline,) = step.pipelines
    assert pipeline.sizes == sizes


@pytest.mark.usefixtures("four")
def test_a_batch_may_have_fewer_samples_than_there_are_replicas() -> None:
    _compare(replicated(_model(), 4, 1), samples=3)


def test_stand_ins_that_share_their_memory_work_too() -> None:
    _compare(replicated(_model(), 2, 2, chunks=2))


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("counts", [(2, 1), (1, 2), (3, 1), (2, 1, 1), (1, 2, 1), (2, 3), (2, 4)])
def test_stages_with_numbers_of_replicas_of_their_own_train_as_the_unsplit_model(
    counts: tuple[int, ...], chunks: int
) -> None:
    units = chunks * lcm(*counts)
    with logical_devices(sum(counts)):
        step = _compare(by_stage(_model(), counts, chunks=chunks), samples=2 * units)
    (pipeline,) = step.pipelines
    assert pipeline.sizes == (2,) * units


@pytest.mark.parametrize("schedule", ["fill-drain", "zero-bubble", "interleaved"])
@pytest.mark.parametrize("counts", [(3, 1), (1, 3), (1, 2, 1)])
@pytest.mark.usefixtures("four")
def test_every_schedule_works_with_replicas_by_stage(
    counts: tuple[int, ...], schedule: Any
) -> None:
    _compare(by_stage(_model(), counts, chunks=4, schedule=schedule), samples=24)


@pytest.mark.usefixtures("four")
def test_pipelines_of_unlike_shares_may_share_a_device() -> None:
    placement = by_stage(_model(), (2, 1), chunks=2)
    shares = tuple(
        Replica(device=f"cpu:{index}", samples=samples) for index, samples in ((0, 3), (1, 1))
    )
    changed = {"replicas": {"cpu:0": shares}, "batch_size": 4}
    step = _compare(placement.model_copy(update=changed), samples=15)
    (pipeline,) = step.pipelines
    assert pipeline.sizes == (6, 2, 5, 2)


@pytest.mark.parametrize("samples", [23, 17, 13, 7, 4, 2])
@pytest.mark.parametrize("counts", [(3, 1), (1, 2, 1)])
@pytest.mark.usefixtures("four")
def test_units_may_be_uneven(counts: tuple[int, ...], samples: int) -> None:
    _compare(by_stage(_model(), counts, chunks=3), samples=samples)


@pytest.mark.parametrize("schedule", ["1f1b", "fill-drain"])
@pytest.mark.parametrize("counts", [(3, 1), (2, 3), (1, 2, 1)])
def test_each_replica_runs_its_units_in_the_order_of_the_schedule(
    counts: tuple[int, ...], schedule: Any
) -> None:
    chunks, units = 4, lcm(*counts)
    with logical_devices(sum(counts)):
        step = _compare(by_stage(_model(), counts, chunks=chunks, schedule=schedule), samples=48)
        (pipeline,) = step.pipelines
        pipeline.engine.trace = issued = []
        step(*_data(48))
    passes: dict[torch.device, list[tuple[str, int]]] = {}
    slots: Counter[tuple[torch.device, int]] = Counter()
    for item in issued:
        passes.setdefault(item.device, []).append((item.phase, item.micro_batch))
    for one in pipeline.stages:
        slots[one.device, one.position] += len(one.slots)
    expected = plan(schedule, range(len(counts)), chunks)
    replicas = [(stage, one) for stage, count in enumerate(counts) for one in range(count)]
    for index, (stage, replica) in enumerate(replicas):
        mine = [unit for unit in range(units) if unit * counts[stage] // units == replica]
        place = torch.device("cpu", index)
        # a pass of a stage is a pass of each of its pieces, one after another
        assert [one for one, _ in groupby(passes[place])] == [
            (phase, micro_batch * units + unit)
            for _, phase, micro_batch in expected.by_device()[stage]
            for unit in mine
        ]
        rooms = {count for (there, _), count in slots.items() if there == place}
        assert rooms == {expected.in_flight[stage] * len(mine)}


@pytest.mark.parametrize("counts", [(3, 1), (1, 3)])
@pytest.mark.usefixtures("four")
def test_zero_bubble_counts_the_passes_of_all_units_on_a_device(counts: tuple[int, ...]) -> None:
    placement = by_stage(_model(), counts, chunks=6, schedule="zero-bubble")
    (pipeline,) = _compare(placement, samples=36).pipelines
    # on stand-ins, every pass counts as 1 ms
    first = [f"cpu:{sum(counts[:stage])}" for stage in range(len(counts))]
    pieces = [
        len({one.position for one in pipeline.stages if str(one.device) == place})
        for place in first
    ]
    times = [3 // count * own for count, own in zip(counts, pieces, strict=True)]
    expected = plan(
        "zero-bubble",
        range(len(counts)),
        6,
        forward_ms=times,
        backward_ms=[2 * time for time in times],
        weight_grad_ms=times,
    )
    assert pipeline.plan.issue == expected.issue
