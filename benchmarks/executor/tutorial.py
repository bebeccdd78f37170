"""Peer: the pipeline of PyTorch's model-parallel tutorial, with one thread and plain autograd.

Source: "Single-Machine Model Parallel Best Practices", PyTorch tutorials, "Speed Up by Pipelining
Inputs".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import cases, contest, parts
from .cases import Loss, Training
from .contest import Contender

ENGINE = "tutorial"


class Pipeline(nn.Module):
    """A pipeline in which micro-batch i runs through part p in turn i + p.

    The last part goes first in each turn.
    """

    def __init__(
        self, stages: Sequence[nn.Module], places: Sequence[torch.device], split_size: int
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            stage.to(place) for stage, place in zip(stages, places, strict=True)
        )
        self.places = list(places)
        self.split_size = split_size

    def forward(self, inputs: Tensor) -> Tensor:
        values: list[parts.Value] = list(torch.split(inputs, self.split_size))
        for turn in range(len(values) + len(self.stages) - 1):
            for index in reversed(range(len(self.stages))):
                chunk = turn - index
                if 0 <= chunk < len(values):
                    values[chunk] = self.stages[index](
                        parts.moved(values[chunk], self.places[index])
                    )
        return torch.cat(values)


def contender(case: Training, count: int, chunks: int) -> Contender:
    """Return the pipeline at a number of devices and micro-batches."""

    def make() -> tuple[Callable[[], Any], Callable[[], Any]]:
        batch = case.batch(cases.home())
        chain = parts.units(case.model(cases.home()))
        split = parts.equal_parts(chain, batch[0][: len(batch[0]) // 2], count)
        return step_of(
            Pipeline(split, cases.places(count), len(batch[0]) // chunks), batch, case.loss
        )

    return contest.here(ENGINE, cases.places(count), chunks, contest.kept(make))


def step_of(
    model: Pipeline, batch: tuple[Tensor, Tensor], loss: Loss
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a training step, and a function that frees its gradients."""
    optimizer = cases.sgd(model.parameters())
    inputs, target = batch

    def step() -> None:
        optimizer.zero_grad()
        output = model(inputs)
        loss(output, target.to(output.device)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step, optimizer.zero_grad
