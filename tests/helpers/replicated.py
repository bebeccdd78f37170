"""Hand-made placements whose stages several devices hold, and the unsplit model's step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn

from placer.schema import Placement, Replica, Schedule


def replicated(
    model: nn.Module,
    replicas: int,
    stages: int = 1,
    kind: str = "cpu",
    samples: Sequence[int] = (),
    chunks: int = 1,
    schedule: Schedule = "1f1b",
    **fields: Any,
) -> Placement:
    """Return a placement of the model's children in consecutive stages.

    Pipeline r has the devices r * stages to (r + 1) * stages - 1.

    Args:
        model: the model.
        replicas: the number of pipelines; 1 for a placement without replicas.
        stages: the stages of each.
        kind: of the devices.
        samples: of a micro-batch, by pipeline; one each if empty.
        chunks: micro-batches.
        schedule: their order.
        fields: others of the placement.
    """
    names = [name for name, _ in model.named_children()]
    shares = tuple(samples) or (1,) * replicas
    first = [f"{kind}:{stage}" for stage in range(stages)]
    return Placement(
        status="feasible",
        objective="step",
        training=True,
        layer_devices={
            name: first[index * stages // len(names)] for index, name in enumerate(names)
        },
        replicas={
            name: tuple(
                Replica(device=f"{kind}:{pipeline * stages + stage}", samples=shares[pipeline])
                for pipeline in range(replicas)
            )
            for stage, name in enumerate(first if replicas > 1 else ())
        },
        batch_size=sum(shares),
        chunks=chunks,
        schedule=schedule,
        stages=tuple(first),
        **fields,
    )


def by_stage(
    model: nn.Module,
    counts: Sequence[int],
    devices: Sequence[str] = (),
    chunks: int = 1,
    schedule: Schedule = "1f1b",
    **fields: Any,
) -> Placement:
    """Return a placement of the model's children in stages with numbers of replicas of their own.

    Args:
        model: the model.
        counts: the number of replicas of each stage.
        devices: of the first stage's replicas, then of the next stage's; CPU stand-ins if empty.
        chunks: micro-batches, of one sample for each unit.
        schedule: their order.
        fields: others of the placement.
    """
    names = [name for name, _ in model.named_children()]
    every = iter(devices or [f"cpu:{index}" for index in range(sum(counts))])
    stages = [[next(every) for _ in range(count)] for count in counts]
    units = lcm(*counts)
    return Placement(
        status="feasible",
        objective="step",
        training=True,
        layer_devices={
            name: stages[index * len(stages) // len(names)][0] for index, name in enumerate(names)
        },
        replicas={
            held[0]: tuple(Replica(device=name, samples=units // len(held)) for name in held)
            for held in stages
            if len(held) > 1
        },
        batch_size=units,
        chunks=chunks,
        schedule=schedule,
        stages=tuple(held[0] for held in stages),
        **fields,
    )


def unsplit_loss(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Tensor,
    target: Tensor,
    sizes: Sequence[int],
) -> Tensor:
    """Run the unsplit model forwards and backwards over parts of a batch; return the mean loss."""
    total = torch.zeros((), dtype=torch.float64)
    parts = zip(inputs.split(list(sizes)), target.split(list(sizes)), strict=True)
    for size, (part, goal) in zip(sizes, parts, strict=True):
        loss = loss_fn(model(part), goal) * size / len(inputs)
        loss.backward()
        total += loss.detach().cpu().double()
    return total
