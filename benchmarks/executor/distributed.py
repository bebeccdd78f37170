"""torch.distributed.pipelining, one process per device.

Its stages are made by hand, as a peer, or follow Placer's placement.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

import placer
from placer import Placement

from . import cases, parts
from .cases import Training
from .ranks import Here

ENGINE = "torch.distributed"
INTERLEAVED = "torch.distributed interleaved"
ZERO_BUBBLE = "torch.distributed zero-bubble"
PLACED = "placer.distributed"
"""``placer.distributed``: the same library, with Placer's stages."""

ENGINES = (ENGINE, INTERLEAVED, ZERO_BUBBLE)
"""The schedules of torch.distributed."""

ROUNDS = {INTERLEAVED: 2}
"""Stages that a device has; 1 of the others."""


def make(
    here: Here, case: Training, engine: str, chunks: int, placement: str
) -> tuple[Callable[[], Any], torch.optim.Optimizer]:
    """Return a step of a training case by a pipeline over all processes, and this rank's optimizer.

    Args:
        here: the process.
        case: the training case.
        engine: ``PLACED``, or a schedule over stages made by hand.
        chunks: the number of micro-batches.
        placement: the placement of ``PLACED``, as JSON.
    """
    if engine == PLACED:
        return _placed(here, case, chunks, placement)
    from torch.distributed.pipelining import PipelineStage

    inputs, target = case.batch(here.home)
    chain = parts.units(case.model(here.home))
    number = here.count * ROUNDS.get(engine, 1)
    modules = [
        _Part(part)
        for part in parts.cut(chain, parts.cuts(_agreed_times(here, chain, inputs), number))
    ]
    own = modules[here.rank :: here.count]
    del chain, modules
    stages = [
        PipelineStage(module, here.rank + turn * here.count, number, here.home)
        for turn, module in enumerate(own)
    ]
    schedule = _schedule(engine, stages, chunks, case.loss)
    optimizer = cases.sgd([parameter for module in own for parameter in module.parameters()])
    options: dict[str, Any] = {}
    if "return_outputs" in inspect.signature(schedule.step).parameters:
        options["return_outputs"] = False

    def step() -> None:
        optimizer.zero_grad()
        given = (inputs,) if here.rank == 0 else ()
        last: dict[str, Any] = (
            {"target": target, "losses": []} if here.rank == here.count - 1 else {}
        )
        schedule.step(*given, **last, **options)
        optimizer.step()

    return step, optimizer


class _Part(nn.Module):
    """A part of a chain with the signature that the library requires of stages.

    It takes the tensors of a tuple as separate arguments, and all of them are contiguous.
    """

    def __init__(self, chain: nn.Sequential) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, *values: Tensor) -> parts.Value:
        values = tuple(_with_contiguous_gradient(value) for value in values)
        made = self.chain(values if len(values) > 1 else values[0])
        return (
            tuple(value.contiguous() for value in made)
            if isinstance(made, tuple)
            else made.contiguous()
        )


def _with_contiguous_gradient(value: Tensor) -> Tensor:
    """Make the gradient of a tensor contiguous, so that it can be sent.

    The gradient of a concatenated tensor is a view of the joint gradient.
    """
    if value.requires_grad:
        value = value.view_as(value)
        value.register_hook(lambda gradient: gradient.contiguous())  # type: ignore[no-untyped-call]
    return value


def _schedule(
    engine: str, stages: Sequence[Any], chunks: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    from torch.distributed.pipelining import (
        Schedule1F1B,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
    )

    if engine == ENGINE:
        return Schedule1F1B(stages[0], n_microbatches=chunks, loss_fn=loss)
    several = ScheduleInterleaved1F1B if engine == INTERLEAVED else ScheduleInterleavedZeroBubble
    return several(list(stages), n_microbatches=chunks, loss_fn=loss)


def _agreed_times(here: Here, chain: Sequence[nn.Module], inputs: Tensor) -> list[float]:
    """Return each module's time as the first process measures it, once for all schedules."""
    if "unit_ms" not in here.kept:
        found = [parts.unit_ms(chain, inputs[: len(inputs) // 2]) if here.rank == 0 else []]
        distributed.broadcast_object_list(found, src=0)
        here.kept["unit_ms"] = found[0]
    times: list[float] = here.kept["unit_ms"]
    return times


def _placed(
    here: Here, case: Training, chunks: int, placement: str
) -> tuple[Callable[[], Any], torch.optim.Optimizer]:
    inputs, target = case.batch(here.home)
    model = case.model(here.home).cpu()
    given = Placement.model_validate_json(placement)
    pipeline = placer.distributed.build(
        model, given, inputs[: len(inputs) // chunks], case.loss, schedule="zero-bubble"
    )
    optimizer = cases.sgd(pipeline.parameters())

    def step() -> None:
        optimizer.zero_grad()
        pipeline.step(inputs, target)
        optimizer.step()

    return step, optimizer
