"""What a model returns of micro-batches is what it returns of the batch, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from placer import DataFlow
from placer.errors import InputError
from placer.testing import logical_devices

Way = Callable[[Tensor], Any]

EQUAL: dict[str, Way] = {
    "sum": lambda h: h.sum(),
    "half a sum": lambda h: h.sum() / 2,
    "a sum over the samples": lambda h: h.square().sum() / h.shape[0],
    "a sum over all numbers": lambda h: -h.sum() / h.numel(),
    "sum of sums": lambda h: h.sum() + 3 * h.square().sum(),
    "sums of sums": lambda h: [h.sum(0).sum(), h.sum(1).sum(), h.sum(0).mean(), h.sum(0)[1] - h.nansum()],
    "products with itself": lambda h: [torch.einsum("nk,nk->", h, h), h.flatten() @ h.flatten()],
    "means of means": lambda h: [h.mean(0).mean(), h.mean(1).mean() + 1, h.mean(0).sum() - h.mean()],
    "mean": lambda h: h.mean() * 2,
    "loss, a mean": lambda h: functional.mse_loss(h, h * 2),
    "loss, a sum": lambda h: functional.mse_loss(h, h * 2, reduction="sum"),
    "largest": lambda h: h.amax() * 2,
    "smallest": lambda h: -h.max(),
    "largest of the largest": lambda h: [h.amax(0).max(), 1 - h.amin(), h.amax().exp(), h.amax(0).amax() + 1],
    "how many": lambda h: {"sum": (h > 0).sum(), "count": torch.count_nonzero(h > 0)},
    "whether any and all": lambda h: ((h > 0).any(), (h > 0).all()),
    "transposed": lambda h: h.t(),
    "stacked": lambda h: torch.stack([h, h * 2]),
    "rows of each sample in turn": lambda h: functional.linear(h.reshape(-1, 4), torch.eye(4).to(h)).relu() * 2,
    "a row for every number": lambda h: h.double().flatten(),
    "nested": lambda h: {"first": [h.t()[None], h.sum()], "all": h},
}
UNTOLD: dict[str, Way] = {
    "one after the other": lambda h: torch.cat([h, h * 2]),
    "samples second, in a list": lambda h: torch.stack([h, h * 2]).reshape(-1, 8),
    "again and again": lambda h: h.repeat(2, 1),
}
REFUSED: dict[str, Way] = {
    "norm": lambda h: h.norm(),
    "deviation": lambda h: h.std(),
    "a sum, rounded": lambda h: torch.div(h.sum(), 2, rounding_mode="floor"),
    "which is the largest": lambda h: h.argmax(),
    "the first sample": lambda h: h[0, 0],
    "a sum and a mean": lambda h: h.sum() + h.mean(),
    "a sum and one": lambda h: h.sum() + 1,
    "how large a sum is": lambda h: h.sum().abs(),
    "how large the largest is": lambda h: h.max().abs(),
    "a norm of norms": lambda h: h.norm(dim=0).norm(),
    "means, squared": lambda h: h.mean(0).square().sum(),
    "root of a mean": lambda h: h.square().mean().sqrt(),
    "every sample by every one": lambda h: h @ h.t(),
}


class _Ended(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.first, self.last, self.way = nn.Linear(6, 8), nn.Linear(8, 8), way

    def forward(self, x: Tensor) -> Any:
        return self.way(self.last(self.first(x)))


def _flow(model: nn.Module) -> DataFlow:
    flow = DataFlow(model, fine_grained=True)
    for index, name in enumerate(flow.layer_gpus):
        flow.layer_gpus[name] = index % 2
    flow.update_flow()
    return flow


def _split(model: nn.Module, *inputs: Tensor, chunks: int) -> tuple[Any, str]:
    """What a placed model returns of micro-batches, and why it ran through hooks."""
    with logical_devices(2), torch.no_grad():
        flow = _flow(model)
        return flow(*inputs, chunks=chunks), flow.not_captured_because


@pytest.mark.parametrize("chunks", [2, 3, 7])
@pytest.mark.parametrize("way", EQUAL.values(), ids=EQUAL)
def test_results_of_micro_batches_make_that_of_the_batch(way: Way, chunks: int) -> None:
    torch.manual_seed(0)
    model, x = _Ended(way).double(), torch.randn(7, 6, dtype=torch.float64)
    with torch.no_grad():
        expected = model(x)
    found, hooked = _split(model, x, chunks=chunks)
    assert not hooked
    torch.testing.assert_close(found, expected, check_device=False)


@pytest.mark.parametrize("way", REFUSED.values(), ids=REFUSED)
def test_what_only_all_samples_tell_is_refused(way: Way) -> None:
    for chunks in (2, 6):
        with pytest.raises(InputError, match=r"output \(the result\) is made of a micro-batch's samples together"):
            _split(_Ended(way), torch.randn(6, 6), chunks=chunks)
    whole, _ = _split(model := _Ended(way), x := torch.randn(6, 6), chunks=1)
    torch.testing.assert_close(whole, model.cpu()(x), check_device=False)


@pytest.mark.parametrize("way", UNTOLD.values(), ids=UNTOLD)
def test_rows_that_are_of_no_sample_after_another_are_refused(way: Way) -> None:
    with pytest.raises(InputError, match=r"output \(the result\) has no batch dimension"):
        _split(_Ended(way), torch.randn(6, 6), chunks=2)


class _Recurrent(nn.Module):
    """Returns states as LSTMs do, samples second."""

    def __init__(self, hooked: bool) -> None:
        super().__init__()
        self.lstm, self.last, self.hooked = nn.LSTM(6, 8, 2, batch_first=True), nn.Linear(8, 3), hooked

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.hooked and x.abs().max() > 100:  # torch.export refuses to go by values
            x = x / 2
        h, (hidden, cells) = self.lstm(x)
        return self.last(h), hidden, cells


@pytest.mark.parametrize(("samples", "chunks"), [(4, 2), (6, 2), (5, 2)])
def test_states_whose_second_dimension_is_the_batch_are_joined_there(samples: int, chunks: int) -> None:
    model, x = _Recurrent(hooked=False).double(), torch.randn(samples, 5, 6, dtype=torch.float64)
    with torch.no_grad():
        expected = model(x)
    found, hooked = _split(model, x, chunks=chunks)
    assert not hooked
    torch.testing.assert_close(found, expected, check_device=False)


def test_through_hooks_a_result_is_joined_only_where_each_is_as_long_as_its_micro_batch() -> None:
    """Three micro-batches of 2, 2 and 1: two layers' states are as long as the first of them."""
    with pytest.raises(InputError, match=r"output \[1\] has no batch dimension.*chunks=1"):
        _split(_Recurrent(hooked=True), torch.randn(5, 5, 6), chunks=3)


def test_through_hooks_who_calls_is_told_where_two_dimensions_may_be_the_samples() -> None:
    with pytest.warns(UserWarning, match=r"output \[1\] of a micro-batch has shape \(2, 2, 8\).*chunks=1"):
        _split(_Recurrent(hooked=True), torch.randn(4, 5, 6), chunks=2)


class _Tagger(nn.Module):
    """Pads to the longest of the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed, _ = self.lstm(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        result: Tensor = self.last(pad_packed_sequence(packed, batch_first=True)[0])
        return result


def test_results_of_other_shapes_are_refused_with_both_shapes() -> None:
    with pytest.raises(InputError, match=r"has shape \(2, 5, 3\) for one micro-batch and \(2, 2, 3\) for another"):
        _split(_Tagger(), torch.randn(4, 5, 6), torch.tensor([5, 3, 2, 1]), chunks=2)
