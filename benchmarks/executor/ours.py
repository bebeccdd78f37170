"""A training step by Placer, and by eager PyTorch on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from placer import Cluster, Constraints, DataFlow, Placement, PlacementRequest, Profile, profile, solve
from placer.schedule import Pipeline, plan, step_ms

from . import cases, timing
from .cases import Training
from .sample import Sample, attempt

COMPARED = 3
"""Steps whose losses are held against the unsplit model's."""


def train(case: Training) -> Iterator[Sample]:
    """The whole batch at once on one device; then ours, at each number of micro-batches and devices."""
    cases.prepare()
    model = case.model(cases.home())
    yield attempt(case.name, "eager", 1, 1, lambda: eager(copy.deepcopy(model), case.batch(cases.home()), case.loss))
    for chunks in sorted({chunks for count in cases.counts() for chunks in case.tried(count)}):
        yield from _chunked(case, model, chunks)


def _chunked(case: Training, model: nn.Module, chunks: int) -> Iterator[Sample]:
    inputs, target = case.batch(cases.home())
    unsplit: list[float] = []
    found: list[Profile] = []

    def prepare() -> dict[str, list[float]]:
        unsplit.extend(reference(copy.deepcopy(model), inputs, target, case.loss, chunks))
        found.append(measured(model, inputs, chunks))
        return {}

    prepared = attempt(case.name, "ours", 0, chunks, prepare)
    if prepared.failed:
        yield prepared
        return
    for count in cases.counts():
        if chunks not in case.tried(count):
            continue

        def run(count: int = count) -> dict[str, list[float]]:
            placement = placed(found[0], count, chunks)
            values = ours(copy.deepcopy(model), placement, (inputs, target), case.loss)
            differences = [abs(a - b) for a, b in zip(values.pop("losses"), unsplit, strict=True)]
            return values | {"predicted_ms": [predicted_ms(found[0], placement)], "loss_difference": [max(differences)]}

        yield attempt(case.name, "ours", count, chunks, run)


def eager(
    model: nn.Module, batch: tuple[Tensor, Tensor], loss: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, list[float]]:
    """Times of a step of plain PyTorch, the whole batch at once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, target = batch

    def step() -> None:
        optimizer.zero_grad()
        loss(model(inputs), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return timing.steps(step, [inputs.device])


def reference(
    model: nn.Module, inputs: Tensor, target: Tensor, loss: Callable[[Tensor, Tensor], Tensor], chunks: int
) -> list[float]:
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
    """The placement on the first so many of a profile's devices."""
    assert found.cluster is not None
    devices = found.cluster.devices[:count]
    names = {device.name for device in devices}
    links = tuple(link for link in found.cluster.links if {link.source, link.target} <= names)
    return solve(
        PlacementRequest(
            profile=found,
            cluster=Cluster(devices=devices, links=links),
            constraints=Constraints(contiguous=True),
            chunks=chunks,
            schedule="1f1b",
            transfers="overlapped",
        )
    )


def ours(
    model: nn.Module,
    placement: Placement,
    batch: tuple[Tensor, Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, list[float]]:
    """Times of a step of the pipeline, with its first losses and the number of stages that run without a CUDA graph."""
    flow = DataFlow(model, [str(place) for place in cases.places()])
    flow.update_flow(placement)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = flow.train_step(loss, optimizer, schedule="zero-bubble")
    losses = [step(*batch).item() for _ in range(COMPARED)]
    values: dict[str, Any] = timing.steps(lambda: step(*batch), cases.places())
    pipelines = step._pipelines.values()
    eager_stages = sum(bool(stage.not_recorded_because) for pipeline in pipelines for stage in pipeline.stages)
    return values | {"losses": losses, "eager_stages": [eager_stages], "stages": [len(placement.stages)]}


def predicted_ms(found: Profile, placement: Placement) -> float:
    """The step that the profile promises: its zero-bubble schedule, simulated, without the optimizer.

    A profile has backward passes whole; each half counts half of it. A transfer takes half of what its device sends in
    a micro-batch, which is a value onwards and a gradient back.
    """
    assert found.cluster is not None
    types = {device.name: device.type for device in found.cluster.devices}
    forward, backward = (_by_stage(found, placement, types, kind) for kind in ("forward_ms", "backward_ms"))
    transfer_ms = max(load.send_ms for load in placement.devices) / 2
    order = plan("zero-bubble", range(len(forward)), placement.chunks, forward_ms=forward, backward_ms=backward)
    return step_ms(Pipeline.chain(forward, backward, transfer_ms=transfer_ms, gradient_ms=transfer_ms), order)


def _by_stage(found: Profile, placement: Placement, types: dict[str, str], kind: str) -> Sequence[float]:
    times = dict.fromkeys(placement.stages, 0.0)
    for layer in found.layers:
        place = placement.layer_devices[layer.name]
        times[place] += getattr(layer, kind)[types[place]]
    return list(times.values())
