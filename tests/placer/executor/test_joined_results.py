"""Results for micro-batches equal the results for the batch, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import named
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from placer import BatchOptions, DataFlow
from placer.errors import BatchError, InputError
from placer.testing import logical_devices

Way = Callable[[Tensor], Any]

EQUAL: dict[str, Way] = {
    "sum": lambda h: h.sum(),
    "half a sum": lambda h: h.sum() / 2,
    "a sum over the samples": lambda h: h.square().sum() / h.shape[0],
    "a sum over all numbers": lambda h: -h.sum() / h.numel(),
    "sum of sums": lambda h: h.sum() + 3 * h.square().sum(),
    "sums of sums": lambda h: [
        h.sum(0).sum(),
        h.sum(1).sum(),
        h.sum(0).mean(),
        h.sum(0)[1] - h.nansum(),
    ],
    "products with itself": lambda h: [torch.einsum("nk,nk->", h, h), h.flatten() @ h.flatten()],
    "means of means": lambda h: [
        h.mean(0).mean(),
        h.mean(1).mean() + 1,
        h.mean(0).sum() - h.mean(),
    ],
    "mean": lambda h: h.mean() * 2,
    "loss, a mean": lambda h: functional.mse_loss(h, h * 2),
    "loss, a sum": lambda h: functional.mse_loss(h, h * 2, reduction="sum"),
    "how many": lambda h: {"sum": (h > 0).sum(), "count": torch.count_nonzero(h > 0)},
    "transposed": lambda h: h.t(),
    "stacked": lambda h: torch.stack([h, h * 2]),
    "rows of each sample in turn": lambda h: (
        functional.linear(h.reshape(-1, 4), torch.eye(4).to(h)).relu() * 2
    ),
    "a row for every number": lambda h: h.double().flatten(),
    "nested": lambda h: {"first": [h.t()[None], h.sum()], "all": h},
    "a mean of each number": lambda h: h.mean(0),
    "a list with an item for each sample": lambda h: [{"h": one, "n": len(one)} for one in h],
}
DECLARED: dict[str, tuple[Way, Any]] = {
    "largest": (lambda h: h.amax() * 2, "max"),
    "largest of each number": (lambda h: {"top": h.amax(0)}, {"top": "max"}),
    "smallest": (lambda h: [-h.max(), h.sum()], {"0": "min"}),
    "whether any and all": (lambda h: ((h > 0).any(), (h > 0).all()), {0: "max", 1: "min"}),
    "by a function": (
        lambda h: h.square().sum().sqrt(),
        lambda parts, sizes: torch.stack(parts).square().sum().sqrt(),
    ),
}
REFUSED: dict[str, Way] = {
    "norm": lambda h: h.norm(),
    "deviation": lambda h: h.std(),
    "the first sample": lambda h: h[0, 0],
    "a sum and a mean": lambda h: h.sum() + h.mean(),
    "a sum and one": lambda h: h.sum() + 1,
    "a norm of norms": lambda h: h.norm(dim=0).norm(),
    "means, squared": lambda h: h.mean(0).square().sum(),
    "root of a mean": lambda h: h.square().mean().sqrt(),
    "every sample by every one": lambda h: h @ h.t(),
    "one after the other": lambda h: torch.cat([h, h * 2]),
    "samples second, in a list": lambda h: torch.stack([h, h * 2]).reshape(-1, 8),
    "again and again": lambda h: h.repeat(2, 1),
    "a table that is as long as the batch": lambda h: torch.arange(len(h)),
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


def _split(model: nn.Module, *inputs: Tensor, chunks: int, outputs: Any = None) -> tuple[Any, str]:
    """What a placed model returns for micro-batches, and why it ran through hooks."""
    options = BatchOptions() if outputs is None else BatchOptions(outputs=outputs)
    with logical_devices(2), torch.no_grad():
        flow = _flow(model)
        return flow(*inputs, chunks=chunks, batch_options=options), flow.not_captured_because


@pytest.mark.covering
@pytest.mark.parametrize("chunks", [2, 3, 7])
@pytest.mark.parametrize(
    "way",
    named(
        EQUAL,
        further=[
            *("sum", "half a sum", "sum of sums", "means of means", "loss, a sum", "transposed"),
            *("a sum over the samples", "mean"),
        ],
    ),
)
def test_results_of_micro_batches_make_that_of_the_batch(way: Way, chunks: int) -> None:
    torch.manual_seed(0)
    model, x = _Ended(way).double(), torch.randn(7, 6, dtype=torch.float64)
    with torch.no_grad():
        expected = model(x)
    found, hooked = _split(model, x, chunks=chunks)
    assert not hooked
    torch.testing.assert_close(found, expected, check_device=False)


@pytest.mark.covering
@pytest.mark.parametrize("chunks", [2, 7])
@pytest.mark.parametrize(("way", "outputs"), named(DECLARED, further=["largest"]))
def test_results_are_joined_as_declared(way: Way, outputs: Any, chunks: int) -> None:
    torch.manual_seed(0)
    model, x = _Ended(way).double(), torch.randn(7, 6, dtype=torch.float64)
    with torch.no_grad():
        expected = model(x)
    found, _ = _split(model, x, chunks=chunks, outputs=outputs)
    torch.testing.assert_close(found, expected, check_device=False)
    with pytest.raises(BatchError, match="is not what its micro-batches give"):
        _split(model, x, chunks=chunks, outputs=0)


@pytest.mark.covering(every=4, first=1)
@pytest.mark.parametrize("way", REFUSED.values(), ids=REFUSED)
def test_what_only_all_samples_tell_is_refused(way: Way) -> None:
    for chunks in (2, 6):
        with pytest.raises(
            BatchError,
            match=r"the result of a batch is not what its micro-batches give: .*chunks=1",
        ):
            _split(_Ended(way), torch.randn(6, 6), chunks=chunks)
    whole, _ = _split(model := _Ended(way), x := torch.randn(6, 6), chunks=1)
    torch.testing.assert_close(whole, model.cpu()(x), check_device=False)


class _Recurrent(nn.Module):
    """Returns states as LSTMs do, samples second."""

    def __init__(self, hooked: bool) -> None:
        super().__init__()
        self.lstm, self.last, self.hooked = (
            nn.LSTM(6, 8, 2, batch_first=True),
            nn.Linear(8, 3),
            hooked,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # torch.export refuses to go by values
        if self.hooked and x.abs().max() > 100:
            x = x / 2
        h, (hidden, cells) = self.lstm(x)
        return self.last(h), hidden, cells


@pytest.mark.covering
@pytest.mark.parametrize("is_hooked", [False, True])
@pytest.mark.parametrize(("samples", "chunks"), [(4, 2), (6, 2), (5, 2), (5, 3)])
def test_states_whose_second_dimension_is_the_batch_are_joined_there(
    samples: int, chunks: int, is_hooked: bool
) -> None:
    """Also where two layers' states are as many as the samples of a micro-batch."""
    model, x = _Recurrent(is_hooked).double(), torch.randn(samples, 5, 6, dtype=torch.float64)
    with torch.no_grad():
        expected = model(x)
    found, hooked = _split(model, x, chunks=chunks)
    assert bool(hooked) == is_hooked
    torch.testing.assert_close(found, expected, check_device=False)


class _Tagger(nn.Module):
    """Pads to the longest of the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed, _ = self.lstm(
            pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        )
        result: Tensor = self.last(pad_packed_sequence(packed, batch_first=True)[0])
        return result


def test_results_of_other_shapes_are_refused_with_both_shapes() -> None:
    inputs = torch.randn(4, 5, 6), torch.tensor([5, 3, 2, 1])
    with pytest.raises(
        BatchError, match=r"the result of a batch is not what its micro-batches give"
    ):
        _split(_Tagger(), *inputs, chunks=2)
    with pytest.raises(
        InputError, match=r"has shape \(2, 5, 3\) for one micro-batch and \(2, 2, 3\) for another"
    ):
        with logical_devices(2), torch.no_grad():
            _flow(_Tagger())(*inputs, chunks=2, batch_options=BatchOptions(verify=False))
