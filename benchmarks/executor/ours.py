"""A training step by Placer: profiled, placed, refined and run, with the details of its time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from placer import (
    Cluster,
    Constraints,
    DataFlow,
    Placement,
    PlacementRequest,
    Profile,
    profile,
    refine,
    solve,
)

from . import cases, contest, memory, timing
from .cases import Loss, Training
from .contest import Contender, Ready
from .sample import release

ENGINE = "ours"
SHARE = 0.3
"""The share of a GPU's memory that a step may keep between its turns."""

COMPARED = 3
"""Steps whose losses are held against the unsplit model's."""


def contender(case: Training, count: int) -> Contender:
    """Return what a user gets: the placement with the shortest steady-state step, refined.

    The search covers replicas, micro-batches, schedule and map. Placements with replicas are not
    refined.

    Args:
        case: the training case.
        count: the number of devices.
    """
    batch, places = case.batch(cases.home()), cases.places(count)
    # on the host, as a user's model is, and so that no device holds a second one
    model = case.model(cases.home()).cpu()
    release()
    profiles = _profiles(case, model, batch, places)
    size = len(batch[0])
    first = solve(question(profiles, count, size))
    pipelines = _pipelines(first)
    each = first.batch_size // pipelines
    taken = next(found for found in profiles if found.batch_size == each)
    best = first if first.replicas else _refined(first, taken, case, model, batch, count)
    release()
    flow = DataFlow(copy.deepcopy(model), [str(place) for place in places])
    ready = steps(flow, best, batch, case.loss)
    if _leaves_room(best, places):
        ready = contest.staying(ready)
    values = _behind(ready, best, places)
    release()
    unsplit = reference(model.to(cases.home()), *batch, case.loss, best.chunks * pipelines)
    differences = [abs(a - b) for a, b in zip(values.pop("losses"), unsplit, strict=True)]
    made = contest.here(ENGINE, places, best.chunks, ready)
    made.values = values | {
        "first_predicted_ms": [_step_ms(first)],
        "predicted_ms": [_step_ms(best)],
        "loss_difference": [max(differences)],
        "stages": [len(best.stages)],
        "pipelines": [pipelines],
    }
    return made


def _leaves_room(placement: Placement, places: Sequence[torch.device]) -> bool:
    """Return whether a step's memory may stay on the GPUs while other engines take their turns.

    Recording the passes again at every turn takes longer than the turn.
    """
    return all(
        place.type == "cuda"
        and load.memory.total_bytes < SHARE * torch.cuda.get_device_properties(place).total_memory
        for load, place in zip(placement.devices, places, strict=False)
    )


def _pipelines(placement: Placement) -> int:
    """Return the number of pipelines that share each micro-batch."""
    return max(map(len, placement.replicas.values()), default=1)


def _refined(
    first: Placement,
    taken: Profile,
    case: Training,
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    count: int,
) -> Placement:
    """Return the placement after its stages were measured and it was solved again."""
    part, goal = (tensor[: first.batch_size] for tensor in batch)
    asked = question([taken], count, len(batch[0]))
    return refine(
        first, copy.deepcopy(model), part, request=asked, loss_fn=case.loss, target=goal
    ).placement


def _profiles(
    case: Training, model: nn.Module, batch: tuple[Tensor, Tensor], places: Sequence[torch.device]
) -> list[Profile]:
    """Return the profile of every micro-batch size to try."""
    inputs, target = batch
    sizes = [len(inputs) // chunks for chunks in case.chunks]
    return profile(
        model,
        inputs[: max(sizes)].cpu(),
        [str(place) for place in places],
        training=True,
        optimizer=cases.sgd,
        granularity=case.granularity,
        progress=False,
        batch_sizes=sizes,
        loss_fn=case.loss,
        target=target[: max(sizes)].cpu(),
    )


def steps(
    flow: DataFlow, placement: Placement, batch: tuple[Tensor, Tensor], loss: Loss, **options: Any
) -> Ready:
    """Return steps of a flow with this placement.

    Their memory is free behind the context.

    Args:
        flow: the model.
        placement: its map, schedule and micro-batches.
        batch: inputs and target.
        loss: a function of output and target.
        options: further arguments of ``train_step``.
    """

    @contextmanager
    def ready() -> Iterator[partial[Any]]:
        flow.update_flow(placement)
        optimizer = cases.sgd(flow.parameters())
        yield partial(flow.train_step(loss, optimizer, **options), *batch)
        optimizer.zero_grad()

    return ready


def _behind(
    ready: Any, placement: Placement, places: Sequence[torch.device]
) -> dict[str, list[float]]:
    """Return a step's first losses, each device's memory, and the time of an isolated step.

    The model must be on the host before. Otherwise the step would fill gaps next to tensors that
    stay on a device, and these bytes would not be counted.
    """
    used = memory.Meter(places)
    with ready() as step:
        losses = [step().item() for _ in range(COMPARED)]
        used.forget_peak()
        alone = timing.steps(step, places)
        for _ in range(timing.repetitions().shortest_row):  # consecutive steps overlap
            step()
        timing.wait(places)
        stages = [stage for pipeline in step.func.pipelines for stage in pipeline.stages]
        eager = sum(bool(stage.not_recorded_because) for stage in stages)
        times = {
            "alone_ms": alone["step_ms"],
            "host_ms": alone["host_ms"],
            "eager_stages": [float(eager)],
        }
        return times | {"losses": losses} | used.against(placement)


def reference(
    model: nn.Module, inputs: Tensor, target: Tensor, loss: Loss, chunks: int
) -> list[float]:
    """Return the first losses of the unsplit model over the same micro-batches."""
    optimizer = cases.sgd(model.parameters())
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


def measured(model: nn.Module, inputs: Tensor, chunks: int, count: int | None = None) -> Profile:
    """Return the profile of a micro-batch on the first devices, for a model on the host."""
    part = inputs[: len(inputs) // chunks].cpu()
    devices = [str(place) for place in cases.places(count)]
    return profile(
        copy.deepcopy(model).cpu(),
        part,
        devices,
        training=True,
        optimizer=cases.sgd,
        progress=False,
    )


def placed(found: Profile, count: int, chunks: int) -> Placement:
    """Return the placement with the smallest bottleneck on a profile's first ``count`` devices."""
    return solve(
        PlacementRequest(
            profile=found,
            cluster=_of_first(found, count),
            constraints=Constraints(contiguous=True),
            chunks=chunks,
            schedule="1f1b",
            transfers="overlapped",
            time_limit_s=_solver_s(),
        )
    )


def question(profiles: Sequence[Profile], count: int, size: int) -> PlacementRequest:
    """Return the request for the shortest steady-state step on the first ``count`` devices."""
    return PlacementRequest(
        profile=profiles[0],
        profiles=tuple(profiles[1:]),
        cluster=_of_first(profiles[0], count),
        objective="step",
        step_kind="steady-state",
        batch_size=size,
        schedule="auto",
        replicas="auto",
        constraints=Constraints(contiguous=True),
        time_limit_s=_solver_s(),
    )


def _solver_s() -> float:
    """Return the solver's time limit for one placement."""
    return cases.sized(2.0, 20.0)


def _step_ms(placement: Placement) -> float:
    """Return the predicted time of a steady-state step."""
    assert placement.objective_value is not None
    return placement.objective_value


def _of_first(found: Profile, count: int) -> Cluster:
    """Return the first ``count`` of a profile's devices."""
    assert found.cluster is not None
    devices = found.cluster.devices[:count]
    names = {device.name for device in devices}
    return Cluster(
        devices=devices,
        links=tuple(link for link in found.cluster.links if {link.source, link.target} <= names),
    )


def eager(
    model: nn.Module, batch: tuple[Tensor, Tensor], loss: Loss
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a whole-batch step of plain PyTorch, and a function that frees its gradients."""
    optimizer = cases.sgd(model.parameters())
    inputs, target = batch

    def step() -> None:
        optimizer.zero_grad()
        loss(model(inputs), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step, optimizer.zero_grad
