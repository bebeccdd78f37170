"""The experiment of PyTorch's model-parallel tutorial: ResNet-50, 128 px, batch 120, SGD, MSE, 2 devices.

The batch is split into micro-batches of several sizes; the tutorial's own cut is behind layer2.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow, Profile, profile, solve, zoo

from . import cases, ours, parts
from .cases import Loss, Training
from .sample import Sample, attempt
from .tutorial import Pipeline, step_times

CASE = "tutorial"
DEVICES = 2
BATCH, SIZE = (12, 32) if cases.is_small() else (120, 128)
SPLITS = (6,) if cases.is_small() else (5, 10, 20, 40, 60)
FASTEST = (2,) if cases.is_small() else (2, 3)
"""Numbers of micro-batches of which one gives the shortest step."""


def _model() -> zoo.ResNet:
    return zoo.resnet18() if cases.is_small() else zoo.resnet50()


def _data() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(BATCH, 3, SIZE, SIZE)
    return inputs, functional.one_hot(torch.randint(1000, (BATCH,)), 1000).float()


TRAINING = Training(
    CASE,
    "tiny ResNet-18, MSE" if cases.is_small() else "ResNet-50, 128 px, batch 120, MSE",
    _model,
    _data,
    functional.mse_loss,
    FASTEST,
)


def measure() -> Iterator[Sample]:
    """One GPU, then the tutorial's pipeline and ours at each split size (the sample's ``chunks``).

    The tutorial's with the whole batch as one split is its model that is split, but no pipeline.
    """
    cases.prepare()
    torch.manual_seed(0)
    with cases.home():
        model, data, loss = _model(), _data(), functional.mse_loss
    yield attempt(CASE, "eager", 1, BATCH, lambda: ours.eager(copy.deepcopy(model), data, loss))
    if len(cases.places()) < DEVICES:
        yield Sample(CASE, "ours", DEVICES, 0, failed=f"there are fewer than {DEVICES} devices")
        return
    for split in (*SPLITS, BATCH):
        yield attempt(CASE, "tutorial", DEVICES, split, partial(_theirs, model, data, loss, split))
    profiles: list[Profile] = []

    def prepare() -> dict[str, list[float]]:
        profiles.extend(_profiles(model, data, loss))
        return {}

    prepared = attempt(CASE, "ours", 0, 0, prepare)
    if prepared.failed:
        yield prepared
        return
    flow = DataFlow(copy.deepcopy(model), [str(place) for place in cases.places(DEVICES)])
    for found in profiles:
        yield attempt(CASE, "ours", DEVICES, found.batch_size, partial(_ours, flow, found, data, loss))


def _profiles(model: nn.Module, data: tuple[Tensor, Tensor], loss: Loss) -> list[Profile]:
    """Of every split size, of a model that is on the host, as a user's is."""
    return profile(
        copy.deepcopy(model).cpu(),
        data[0][: max(SPLITS)].cpu(),
        [str(place) for place in cases.places(DEVICES)],
        training=True,
        optimizer="sgd",
        progress=False,
        batch_sizes=SPLITS,
        loss_fn=loss,
        target=data[1][: max(SPLITS)].cpu(),
    )


def _ours(flow: DataFlow, found: Profile, data: tuple[Tensor, Tensor], loss: Loss) -> dict[str, list[float]]:
    placement = solve(ours.question([found], DEVICES, len(data[0])))
    return ours.timed(flow, placement, data, loss)


def _theirs(model: zoo.ResNet, data: tuple[Tensor, Tensor], loss: Loss, split: int) -> dict[str, list[float]]:
    return step_times(Pipeline(_halves(copy.deepcopy(model)), cases.places(DEVICES), split), data, loss)


def _halves(model: zoo.ResNet) -> Sequence[nn.Module]:
    stem = (model.conv1, model.bn1, model.relu, model.maxpool)
    first = nn.Sequential(*stem, model.layer1, model.layer2)
    return [first, nn.Sequential(model.layer3, model.layer4, parts.head(model))]
