"""A model over stand-ins, batches for a stream of it, and what the unsplit model gives for them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from small_models import Skips
from splitting import TOLERANCE, twins
from torch import Tensor, nn

from placer import DataFlow, devices
from placer.capture.pytrees import flatten

ROW = 5


def assert_close(given: Any, expected: Any) -> None:
    """Both nests are of one type and hold the same numbers."""
    assert type(given) is type(expected)
    ours, theirs = flatten(given)[0], flatten(expected)[0]
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), atol=TOLERANCE, rtol=TOLERANCE)


def skips() -> tuple[nn.Module, list[Tensor]]:
    model, _ = twins(Skips, training=False)
    return model, [torch.randn(4, ROW, dtype=torch.float64) for _ in range(7)]


def placed(model: nn.Module, parts: int = 3, **options: Any) -> DataFlow:
    """The model over stand-ins, in as many contiguous parts."""
    flow = DataFlow(model, fine_grained=True, **options)
    names = list(flow.layer_gpus)
    for index, name in enumerate(names):
        flow.layer_gpus[name] = index * parts // len(names)
    flow.update_flow()
    return flow


@torch.no_grad()
def unsplit(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """What the unsplit model gives, its stand-ins not looked at."""
    with devices.unobserved():
        return [copy.deepcopy(model)(batch) for batch in batches]
