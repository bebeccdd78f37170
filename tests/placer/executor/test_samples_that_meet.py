"""Where the samples of a batch meet one another inside a model, micro-batches are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from covering import named
from torch import Tensor, nn
from torch.nn import functional

from placer import BatchOptions, DataFlow
from placer.errors import BatchError
from placer.testing import logical_devices

Way = Callable[[Tensor], Tensor]

MEET: dict[str, Way] = {
    "every sample and every one": lambda h: functional.logsigmoid(h @ h.t()).mean(),
    "a softmax over samples": lambda h: h.softmax(0).square().sum(1),
    "ranks": lambda h: h.sort(0).values,
    "a running sum": lambda h: h.cumsum(dim=0),
    "the next sample": lambda h: h.roll(1, 0),
    "backwards": lambda h: h.flip([1, 0]),
}
APART: dict[str, Way] = {
    "a softmax over numbers": lambda h: h.softmax(-1),
    "by itself": lambda h: (h[:, :, None] * h[:, None]).softmax(-1).sum((1, 2)),
    "sorted numbers": lambda h: h.sort(-1).values.flip(1),
    "a mean": lambda h: h.square().mean(),
}


class _Ended(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.first, self.last, self.way = nn.Linear(6, 8), nn.Linear(8, 8), way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.last(self.first(x)))


def _flow(way: Way) -> DataFlow:
    flow = DataFlow(_Ended(way))
    for index, name in enumerate(flow.layer_gpus):
        flow.layer_gpus[name] = index % 2
    flow.update_flow()
    return flow


@pytest.mark.parametrize("way", named(MEET, further=["a softmax over samples", "the next sample"]))
def test_a_batch_whose_samples_meet_is_not_cut(way: Way) -> None:
    with logical_devices(2):
        flow = _flow(way)
        flow(torch.randn(6, 6))
        with pytest.raises(
            BatchError, match=r"the result of a batch is not what its micro-batches give.*chunks=1"
        ):
            flow(torch.randn(6, 6), chunks=2)
        flow(torch.randn(6, 6), chunks=2, batch_options=BatchOptions(verify=False))


class _Similarity(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return functional.logsigmoid(h @ h.t()).mean()


def test_a_step_whose_samples_meet_inside_the_model_is_refused() -> None:
    with logical_devices(2):
        flow = _flow(_Similarity())
        step = flow.train_step(lambda result, target: result)
        step(torch.randn(6, 6), None, chunks=1)
        with pytest.raises(
            BatchError, match=r"the result of a batch is not what its micro-batches give"
        ):
            step(torch.randn(6, 6), None, chunks=2)


@pytest.mark.parametrize("way", APART.values(), ids=APART)
def test_where_samples_are_apart_nothing_is_told(way: Way) -> None:
    with logical_devices(2), warnings.catch_warnings():
        warnings.simplefilter("error")
        _flow(way)(torch.randn(6, 6), chunks=2)


class _Alibi(nn.Module):
    """Lays out what it makes of the mask by the size of the other input, as Falcon does: their
    batch is one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        slopes = (
            (mask[:, None] * torch.ones(2, 1))
            .reshape(mask.shape[0] * 2, 1, 5)
            .reshape(x.shape[0], -1, 1, 5)
        )
        return self.last(self.first(x)), slopes


def test_the_sizes_of_two_inputs_are_those_of_one_batch() -> None:
    with logical_devices(2), warnings.catch_warnings():
        warnings.simplefilter("error")
        flow = DataFlow(_Alibi())
        for index, name in enumerate(flow.layer_gpus):
            flow.layer_gpus[name] = index % 2
        flow.update_flow()
        flow(torch.randn(6, 6), torch.rand(6, 5), chunks=2)
