"""The experiment of PyTorch's model-parallel tutorial on two devices.

It trains ResNet-50 on 120 images of 128 px with SGD and a mean squared error. The batch is split
into micro-batches of several sizes; the tutorial cuts the model behind layer2.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow, Profile, profile, solve, zoo

from . import cases, contest, ours, parts
from .cases import Loss, Training
from .contest import Contender
from .sample import Sample, reason, release
from .tutorial import Pipeline, step_of

CASE = "tutorial"
DEVICES = 2


def training() -> Training:
    """Return the case, with the numbers of micro-batches of which one gives the shortest step."""
    label = cases.sized("tiny ResNet-18, MSE", "ResNet-50, 128 px, batch 120, MSE")
    return Training(CASE, label, _model, _data, functional.mse_loss, cases.sized((2,), (2, 3)))


def _model() -> zoo.ResNet:
    return cases.sized(zoo.resnet18, zoo.resnet50)()


def _data() -> tuple[Tensor, Tensor]:
    batch, pixels = cases.sized((12, 32), (120, 128))
    inputs = torch.randn(batch, 3, pixels, pixels)
    return inputs, functional.one_hot(torch.randint(1000, (batch,)), 1000).float()


def _splits() -> tuple[int, ...]:
    """Return the split sizes that are tried, in addition to the whole batch."""
    return cases.sized((6,), (5, 10, 20, 40, 60))


def measure() -> Iterator[Sample]:
    """Yield samples of one GPU, then of the tutorial's pipeline and Placer in turns at each size.

    The split size is the sample's ``chunks``. With the whole batch as one split, the tutorial's
    model is split but not pipelined.
    """
    cases.prepare()
    torch.manual_seed(0)
    with cases.home():
        model, data, loss = _model(), _data(), functional.mse_loss
    one = contest.here(
        "eager",
        cases.places(1),
        len(data[0]),
        contest.kept(lambda: ours.eager(copy.deepcopy(model), data, loss)),
    )
    if len(cases.places()) < DEVICES:
        yield from contest.alternate(CASE, [one])
        yield Sample(CASE, "ours", DEVICES, 0, failed=f"there are fewer than {DEVICES} devices")
        return
    contenders = [one, *(_theirs(model, data, loss, split) for split in (*_splits(), len(data[0])))]
    try:
        contenders += _ours(model, data, loss)
    except Exception as error:
        yield Sample(CASE, "ours", DEVICES, 0, failed=reason(error))
    release()
    yield from contest.alternate(CASE, contenders)


def _profiles(model: nn.Module, data: tuple[Tensor, Tensor], loss: Loss) -> list[Profile]:
    """Return the profile of every split size, for a model on the host, as a user's model is."""
    inputs, target = (tensor[: max(_splits())].cpu() for tensor in data)
    return profile(
        copy.deepcopy(model).cpu(),
        inputs,
        [str(place) for place in cases.places(DEVICES)],
        training=True,
        optimizer=cases.sgd,
        progress=False,
        batch_sizes=_splits(),
        loss_fn=loss,
        target=target,
    )


def _ours(model: nn.Module, data: tuple[Tensor, Tensor], loss: Loss) -> list[Contender]:
    """Return Placer at each split size; one flow gets each placement in turn."""
    profiles, places = _profiles(model, data, loss), cases.places(DEVICES)
    flow = DataFlow(copy.deepcopy(model), [str(place) for place in places])
    made = []
    for found in profiles:
        ready = ours.steps(flow, solve(ours.question([found], DEVICES, len(data[0]))), data, loss)
        made.append(contest.here("ours", places, found.batch_size, ready))
    return made


def _theirs(model: zoo.ResNet, data: tuple[Tensor, Tensor], loss: Loss, split: int) -> Contender:
    def make() -> tuple[Callable[[], Any], Callable[[], Any]]:
        return step_of(
            Pipeline(_halves(copy.deepcopy(model)), cases.places(DEVICES), split), data, loss
        )

    return contest.here("tutorial", cases.places(DEVICES), split, contest.kept(make))


def _halves(model: zoo.ResNet) -> Sequence[nn.Module]:
    stem = (model.conv1, model.bn1, model.relu, model.maxpool)
    first = nn.Sequential(*stem, model.layer1, model.layer2)
    return [first, nn.Sequential(model.layer3, model.layer4, parts.head(model))]
