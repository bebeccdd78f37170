"""Peer: torchgpipe, where it can be imported, balanced by its own ``balance_by_time``, without recomputing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module

import torch
from torch import nn

from . import cases, parts, timing
from .cases import Training
from .sample import Sample, attempt

ENGINE = "torchgpipe"


def train(case: Training) -> Iterator[Sample]:
    """At each number of devices and micro-batches."""
    cases.prepare()
    for count in cases.counts():
        for chunks in case.tried(count):
            yield attempt(case.name, ENGINE, count, chunks, partial(_step_times, case, count, chunks))


def _step_times(case: Training, count: int, chunks: int) -> dict[str, list[float]]:
    gpipe, balances = import_module("torchgpipe"), import_module("torchgpipe.balance")
    inputs, target = case.batch(cases.home())
    chain = nn.Sequential(*parts.units(case.model(cases.home())))
    balance = balances.balance_by_time(count, chain, inputs[: len(inputs) // chunks], device=cases.home())
    model = gpipe.GPipe(chain, balance, devices=cases.places(count), chunks=chunks, checkpoint="never")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, target = inputs.to(model.devices[0]), target.to(model.devices[-1])

    def step() -> None:
        optimizer.zero_grad()
        case.loss(model(inputs), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return timing.in_a_row(step, model.devices)
