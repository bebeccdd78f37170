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

SOLVER_S = 10.0
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
        profiles.extend(_profiles(case, model, batch[0]))
        return {}

    prepared = attempt(case.name, "ours", 0, 0, prepare)
    if prepared.failed:
        yield prepared
        return
    for count in cases.counts():
        sample = attempt(case.name, "ours", count, 0, partial(_suggested, case, model, batch, profiles, count))
        yield sample if sample.failed else replace(sample, chunks=int(sample.values.pop("chunks")[0]))


def _profiles(case: Training, model: nn.Module, inputs: Tensor) -> list[Profile]:
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
    )


def _suggested(
    case: Training, model: nn.Module, batch: tuple[Tensor, Tensor], profiles: Sequence[Profile], count: int
) -> dict[str, list[float]]:
    """What a user gets: micro-batches, schedule and map chosen for the shortest step, refined once, and run."""
    question = _question(profiles, count, len(batch[0]))
    placement = solve(question)
    taken = next(found for found in profiles if found.batch_size == placement.batch_size)
    part, goal = (tensor[: placement.batch_size] for tensor in batch)
    refinement = refine(
        placement,
        copy.deepcopy(model),
        part,
        request=question.model_copy(update={"profile": taken, "profiles": ()}),
        loss_fn=case.loss,
        target=goal,
        rounds=2,
    )
    best = refinement.placement
    release()
    values = ours(model, best, batch, case.loss)
    release()
    unsplit = reference(copy.deepcopy(model), *batch, case.loss, best.chunks)
    differences = [abs(a - b) for a, b in zip(values.pop("losses"), unsplit, strict=True)]
    assert placement.objective_value is not None and best.objective_value is not None
    return values | {
        "chunks": [best.chunks],
        "first_predicted_ms": [placement.objective_value],
        "predicted_ms": [best.objective_value],
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


def quickest(profiles: Sequence[Profile], count: int, batch_size: int) -> Placement:
    """The placement with the shortest step on the first so many of a profile's devices, with its micro-batches."""
    return solve(_question(profiles, count, batch_size))


def _question(profiles: Sequence[Profile], count: int, batch_size: int) -> PlacementRequest:
    first, *others = profiles
    return PlacementRequest(
        profile=first,
        profiles=tuple(others),
        batch_size=batch_size,
        cluster=_of_first(first, count),
        objective="step",
        schedule="auto",
        constraints=Constraints(contiguous=True),
        time_limit_s=SOLVER_S,
    )


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

    With them the first losses, and the number of stages that run without a CUDA graph.
    """
    used = memory.Meter(cases.places())
    flow = DataFlow(copy.deepcopy(model), [str(place) for place in cases.places()])
    return timed(flow, placement, batch, loss, used) | used.against(placement)


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
    pipelines = step._pipelines.values()
    eager_stages = sum(bool(stage.not_recorded_because) for pipeline in pipelines for stage in pipeline.stages)
    return values | {"losses": losses, "eager_stages": [eager_stages], "stages": [len(placement.stages)]}
