"""A training step by Placer, and by eager PyTorch on one device."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from placer import Cluster, Constraints, DataFlow, Placement, PlacementRequest, Profile, profile, refine, solve

from . import cases, memory, timing
from .cases import Loss, Training
from .sample import Sample, attempt, release

SOLVER_S = 2.0 if cases.is_small() else 20.0
"""The solver's time for one placement."""

COMPARED = 3
"""Steps whose losses are held against the unsplit model's."""


def train(case: Training) -> Iterator[Sample]:
    """The whole batch at once on one device; then ours, for each number of devices."""
    cases.prepare()
    model = case.model(cases.home())
    batch = case.batch(cases.home())
    yield attempt(case.name, "eager", 1, 1, lambda: eager(copy.deepcopy(model), batch, case.loss))
    profiles: list[Profile] = []

    def prepare() -> dict[str, list[float]]:
        profiles.extend(_profiles(case, model, *batch))
        return {}

    prepared = attempt(case.name, "ours", 0, 0, prepare)
    if prepared.failed:
        yield prepared
        return
    for count in cases.counts():
        sample = attempt(case.name, "ours", count, 0, partial(_suggested, case, model, batch, profiles, count))
        yield sample if sample.failed else replace(sample, chunks=int(sample.values.pop("chunks")[0]))


def _profiles(case: Training, model: nn.Module, inputs: Tensor, target: Tensor) -> list[Profile]:
    """Of every size of micro-batch that is tried, on all devices, of a model that is on the host, as a user's is."""
    sizes = [len(inputs) // chunks for chunks in case.chunks]
    return profile(
        copy.deepcopy(model).cpu(),
        inputs[: max(sizes)].cpu(),
        [str(place) for place in cases.places()],
        training=True,
        optimizer="sgd",
        granularity=case.granularity,
        progress=False,
        batch_sizes=sizes,
        loss_fn=case.loss,
        target=target[: max(sizes)].cpu(),
    )


def _suggested(
    case: Training, model: nn.Module, batch: tuple[Tensor, Tensor], profiles: Sequence[Profile], count: int
) -> dict[str, list[float]]:
    """What a user gets: micro-batches, schedule and map of the shortest step of many in a row, refined, and run."""
    size = len(batch[0])
    placement = solve(question(profiles, count, size))
    taken = next(found for found in profiles if found.batch_size == placement.batch_size)
    part, goal = (tensor[: placement.batch_size] for tensor in batch)
    refinement = refine(
        placement,
        copy.deepcopy(model),
        part,
        request=question([taken], count, size),
        loss_fn=case.loss,
        target=goal,
    )
    best = refinement.placement
    release()
    values = ours(model, best, batch, case.loss)
    release()
    unsplit = reference(copy.deepcopy(model), *batch, case.loss, best.chunks)
    differences = [abs(a - b) for a, b in zip(values.pop("losses"), unsplit, strict=True)]
    return values | {
        "chunks": [best.chunks],
        "first_predicted_ms": [_step_ms(placement)],
        "predicted_ms": [_step_ms(best)],
        "loss_difference": [max(differences)],
    }


def eager(model: nn.Module, batch: tuple[Tensor, Tensor], loss: Loss) -> dict[str, list[float]]:
    """Times of a step of plain PyTorch, the whole batch at once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, target = batch

    def step() -> None:
        optimizer.zero_grad()
        loss(model(inputs), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return timing.in_a_row(step, [inputs.device])


def reference(model: nn.Module, inputs: Tensor, target: Tensor, loss: Loss, chunks: int) -> list[float]:
    """The first losses of the unsplit model over the same micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(COMPARED):
        optimizer.zero_grad()
        total = 0.0
        for part, goal in zip(inputs.chunk(chunks), target.chunk(chunks), strict=True):
            value = loss(model(part), goal) / chunks
            value.backward()  # type: ignore[no-untyped-call]
            total += value.item()
        optimizer.step()
        losses.append(total)
    return losses


def measured(model: nn.Module, inputs: Tensor, chunks: int) -> Profile:
    """The profile of a micro-batch on all devices, of a model that is on the host, as a user's is."""
    part = inputs[: len(inputs) // chunks].cpu()
    devices = [str(place) for place in cases.places()]
    return profile(copy.deepcopy(model).cpu(), part, devices, training=True, optimizer="sgd", progress=False)


def placed(found: Profile, count: int, chunks: int) -> Placement:
    """The placement with the smallest bottleneck on the first so many of a profile's devices."""
    return solve(
        PlacementRequest(
            profile=found,
            cluster=_of_first(found, count),
            constraints=Constraints(contiguous=True),
            chunks=chunks,
            schedule="1f1b",
            transfers="overlapped",
            time_limit_s=SOLVER_S,
        )
    )


def question(profiles: Sequence[Profile], count: int, size: int) -> PlacementRequest:
    """What is asked: the shortest of many steps in a row, of a batch of this size, on the first so many devices."""
    return PlacementRequest(
        profile=profiles[0],
        profiles=tuple(profiles[1:]),
        cluster=_of_first(profiles[0], count),
        objective="step",
        steps="in-a-row",
        batch_size=size,
        schedule="auto",
        constraints=Constraints(contiguous=True),
        time_limit_s=SOLVER_S,
    )


def _step_ms(placement: Placement) -> float:
    """What a step takes by the placement, one of many."""
    assert placement.objective_value is not None
    return placement.objective_value


def _of_first(found: Profile, count: int) -> Cluster:
    """The first so many of a profile's devices."""
    assert found.cluster is not None
    devices = found.cluster.devices[:count]
    names = {device.name for device in devices}
    return Cluster(
        devices=devices, links=tuple(link for link in found.cluster.links if {link.source, link.target} <= names)
    )


def ours(
    model: nn.Module,
    placement: Placement,
    batch: tuple[Tensor, Tensor],
    loss: Loss,
) -> dict[str, list[float]]:
    """Times of a step of the pipeline, on a copy of the model, and the memory of each device that it uses.

    With them the first losses, and the number of stages that run without a CUDA graph. The model is on the host
    meanwhile: gaps between what stays of it on a device would be filled, and not counted.
    """
    home = next(model.parameters()).device
    model.cpu()
    try:
        used = memory.Meter(cases.places())
        flow = DataFlow(copy.deepcopy(model), [str(place) for place in cases.places()])
        return timed(flow, placement, batch, loss, used) | used.against(placement)
    finally:
        model.to(home)


def timed(
    flow: DataFlow,
    placement: Placement,
    batch: tuple[Tensor, Tensor],
    loss: Loss,
    used: memory.Meter | None = None,
) -> dict[str, list[float]]:
    """As ``ours``, of a flow that gets this placement; the memory counts from when all is recorded."""
    flow.update_flow(placement)
    step = flow.train_step(loss, torch.optim.SGD(flow.parameters(), lr=1e-3))
    losses = [step(*batch).item() for _ in range(COMPARED)]
    if used is not None:
        used.forget_peak()
    values: dict[str, Any] = timing.in_a_row(lambda: step(*batch), cases.places())
    eager_stages = sum(bool(stage.not_recorded_because) for pipeline in step.pipelines for stage in pipeline.stages)
    return values | {"losses": losses, "eager_stages": [eager_stages], "stages": [len(placement.stages)]}
