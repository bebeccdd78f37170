"""Peer: the pipeline of PyTorch's model-parallel tutorial: parts on devices, one thread, autograd for the way back.

Source: "Single-Machine Model Parallel Best Practices", PyTorch tutorials, "Speed Up by Pipelining Inputs".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from . import cases, parts, timing
from .cases import Loss, Training
from .sample import Sample, attempt

ENGINE = "tutorial"


class Pipeline(nn.Module):
    """Micro-batch i runs through part p in turn i + p; the last part goes first in each turn."""

    def __init__(self, stages: Sequence[nn.Module], places: Sequence[torch.device], split_size: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stage.to(place) for stage, place in zip(stages, places, strict=True))
        self.places = list(places)
        self.split_size = split_size

    def forward(self, inputs: Tensor) -> Tensor:
        values: list[parts.Value] = list(torch.split(inputs, self.split_size))
        for turn in range(len(values) + len(self.stages) - 1):
            for index in reversed(range(len(self.stages))):
                chunk = turn - index
                if 0 <= chunk < len(values):
                    values[chunk] = self.stages[index](parts.moved(values[chunk], self.places[index]))
        return torch.cat(values)


def train(case: Training) -> Iterator[Sample]:
    """At each number of devices and micro-batches."""
    cases.prepare()
    for count in cases.counts():
        for chunks in case.tried(count):

            def run(count: int = count, chunks: int = chunks) -> dict[str, list[float]]:
                batch = case.batch(cases.home())
                chain = parts.units(case.model(cases.home()))
                split = parts.equal_parts(chain, batch[0][: len(batch[0]) // 2], count)
                return step_times(Pipeline(split, cases.places(count), len(batch[0]) // chunks), batch, case.loss)

            yield attempt(case.name, ENGINE, count, chunks, run)


def step_times(model: Pipeline, batch: tuple[Tensor, Tensor], loss: Loss) -> dict[str, list[float]]:
    """Times of a training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, target = batch

    def step() -> None:
        optimizer.zero_grad()
        output = model(inputs)
        loss(output, target.to(output.device)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return timing.in_a_row(step, model.places)
