"""Peer: torchgpipe without recomputation, balanced by its own ``balance_by_time``.

It takes part where it can be imported.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from . import cases, contest, parts
from .cases import Training
from .contest import Contender

ENGINE = "torchgpipe"


def contender(case: Training, count: int, chunks: int) -> Contender:
    """Return torchgpipe at a number of devices and micro-batches."""
    return contest.here(
        ENGINE, cases.places(count), chunks, contest.kept(lambda: _make(case, count, chunks))
    )


def _make(case: Training, count: int, chunks: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    gpipe, balances = import_module("torchgpipe"), import_module("torchgpipe.balance")
    inputs, target = case.batch(cases.home())
    chain = nn.Sequential(*parts.units(case.model(cases.home())))
    balance = balances.balance_by_time(
        count, chain, inputs[: len(inputs) // chunks], device=cases.home()
    )
    model = gpipe.GPipe(
        chain, balance, devices=cases.places(count), chunks=chunks, checkpoint="never"
    )
    optimizer = cases.sgd(model.parameters())
    inputs, target = inputs.to(model.devices[0]), target.to(model.devices[-1])

    def step() -> None:
        optimizer.zero_grad()
        case.loss(model(inputs), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step, optimizer.zero_grad
