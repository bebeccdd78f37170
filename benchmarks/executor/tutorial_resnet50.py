"""The experiment of PyTorch's model-parallel tutorial: ResNet-50, 128 px, batch 120, SGD, MSE, 2 devices.

The batch is split into micro-batches of several sizes; the tutorial's own cut is behind layer2.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from placer import zoo

from . import cases, ours, parts
from .sample import Sample, attempt
from .tutorial import Pipeline, step_times

CASE = "tutorial"
DEVICES = 2


def measure() -> Iterator[Sample]:
    """One GPU, then the tutorial's pipeline and ours at each split size (the sample's ``chunks``)."""
    cases.prepare()
    batch, size, splits = (12, 32, (6,)) if cases.is_small() else (120, 128, (20, 40, 60))
    torch.manual_seed(0)
    with cases.home():
        model = zoo.resnet18() if cases.is_small() else zoo.resnet50()
        inputs = torch.randn(batch, 3, size, size)
        target = functional.one_hot(torch.randint(1000, (batch,)), 1000).float()
    data, loss = (inputs, target), functional.mse_loss
    yield attempt(CASE, "eager", 1, batch, lambda: ours.eager(copy.deepcopy(model), data, loss))
    if len(cases.places()) < DEVICES:
        yield Sample(CASE, "ours", DEVICES, 0, failed=f"there are fewer than {DEVICES} devices")
        return
    for split in splits:
        yield attempt(CASE, "ours", DEVICES, split, partial(_ours, model, data, batch // split))
    for split in splits:

        def run(split: int = split) -> dict[str, list[float]]:
            halves = _halves(copy.deepcopy(model))
            return step_times(Pipeline(halves, cases.places(DEVICES), split), data, loss)

        yield attempt(CASE, "tutorial", DEVICES, split, run)


def _ours(model: nn.Module, data: tuple[Tensor, Tensor], chunks: int) -> dict[str, list[float]]:
    placement = ours.quickest([ours.measured(model, data[0], chunks)], DEVICES, len(data[0]))
    return ours.ours(copy.deepcopy(model), placement, data, functional.mse_loss)


def _halves(model: zoo.ResNet) -> list[nn.Module]:
    stem = (model.conv1, model.bn1, model.relu, model.maxpool)
    first = nn.Sequential(*stem, model.layer1, model.layer2)
    return [first, nn.Sequential(model.layer3, model.layer4, parts.head(model))]
