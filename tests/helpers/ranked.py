"""What the tests of placer.distributed run in every process of a pool; functions here travel by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from placer import distributed
from placer.graph.structure import flatten

Make = Callable[[], tuple[nn.Module, Any, Any, Callable[[Any, Any], Tensor]]]
"""Makes a model, a batch, its target and the loss; the same in every process."""


def micro_batches(inputs: Any, chunks: int) -> list[Any]:
    """The batch in equal parts along the first dimension of every tensor that has as many samples as the first."""
    leaves, structure = flatten(inputs)
    size = leaves[0].shape[0]
    parts = [leaf.chunk(chunks) if leaf.shape[0] == size else [leaf] * chunks for leaf in leaves]
    return [structure.unflatten(part) for part in zip(*parts, strict=True)]


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def unsplit_step(make: Make, chunks: int, batches: int = 1) -> tuple[list[float], dict[str, Any], dict[str, Tensor]]:
    """Losses, gradients and buffers of the unsplit model over the same micro-batches."""
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    losses = []
    for _ in range(batches):
        total = 0.0
        for part, goal in zip(micro_batches(inputs, chunks), micro_batches(target, chunks), strict=True):
            loss = loss_fn(call(model, part), goal) / chunks
            loss.backward()
            total += loss.item()
        losses.append(total)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return losses, gradients, {name: buffer.clone() for name, buffer in model.named_buffers()}


def split_step(
    make: Make, places: Mapping[str, str], chunks: int, schedule: str, batches: int = 1, ranks: list[int] | None = None
) -> dict[str, Any] | None:
    """This process's part of the same: its losses, gradients and buffers; None where it is none of ``ranks``."""
    group = None if ranks is None else dist.new_group(ranks)
    if ranks is not None and dist.get_rank() not in ranks:
        return None
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    example = micro_batches(inputs, chunks)[0]
    pipeline = distributed.build(model, places, example, loss_fn, chunks=chunks, schedule=schedule, group=group)
    losses = []
    for _ in range(batches):
        loss = pipeline.step(inputs if pipeline.is_first else None, target if pipeline.is_last else None)
        if loss is not None:
            losses.append(loss.item())
    return {
        "losses": losses,
        "gradients": {name: parameter.grad for name, parameter in pipeline.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in pipeline.module.named_buffers()},
        "stages": [stage.stage_index for stage in pipeline.stages],
        "schedule": type(pipeline.schedule).__name__,
    }


def joined(parts: list[dict[str, Any] | None], what: str) -> dict[str, Any]:
    """One of the parts' tables over all processes, which must not overlap."""
    result: dict[str, Any] = {}
    for part in parts:
        if part is not None:
            assert not result.keys() & part[what].keys()
            result |= part[what]
    return result
