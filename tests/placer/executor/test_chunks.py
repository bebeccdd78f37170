from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from splitting import scatter_layers, twins
from torch import Tensor, nn

from placer import BatchOptions, DataFlow
from placer.errors import BatchError, InputError
from placer.executor.engine.fill_drain import even_sizes
from placer.testing import logical_devices

X = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return {"y": self.last(torch.relu(self.norm(self.first(x)))), "size": 3}


@pytest.mark.covering
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("training", [True, False])
def test_chunks_equal_an_unsplit_run_of_the_same_micro_batches(chunks: int, training: bool) -> None:
    model, reference = twins(Model, training)
    with logical_devices(3):
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        result = flow(X, chunks=chunks)
        result["y"].pow(2).sum().backward()
    expected = torch.cat([reference(part)["y"] for part in X.tensor_split(chunks)])
    expected.pow(2).sum().backward()
    assert result["size"] == 3
    torch.testing.assert_close(
        result["y"].detach().cpu(), expected.detach(), atol=1e-10, rtol=1e-10
    )
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-10, rtol=1e-10)
    for ours, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


class _OfOneSize(nn.Module):
    """Its graph holds for the batch size of the example alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x) / float(x.shape[0]))
        return result


class _OfOneSizeInTheEnd(_OfOneSize):
    """The size of its batch is open in its graph until it is asked for as a number."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x))
        return result if float(x.shape[0]) else result[:0]


@pytest.mark.parametrize("make", [_OfOneSize, _OfOneSizeInTheEnd])
def test_results_of_a_model_whose_graph_holds_for_one_size_are_joined(
    make: type[nn.Module],
) -> None:
    model, reference = twins(make, training=False)
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        if make is _OfOneSize:
            with pytest.raises(
                BatchError, match="the result of a batch is not what its micro-batches give"
            ):
                flow(X, chunks=2)
        result = flow(X, chunks=2, batch_options=BatchOptions(verify=make is not _OfOneSize))
    assert not flow.not_captured_because
    torch.testing.assert_close(result.cpu(), torch.cat([reference(part) for part in X.chunk(2)]))


def test_a_step_says_that_a_smaller_last_micro_batch_would_have_another_graph() -> None:
    model, reference = twins(_OfOneSize)
    inputs, target = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        step = flow.train_step(nn.functional.mse_loss, batch_options=BatchOptions(verify=False))
        with pytest.warns(
            UserWarning, match="2 of 4, not 3; a batch whose size 3 divides keeps them"
        ):
            loss = step(inputs, target, chunks=3)
    expected = [
        nn.functional.mse_loss(reference(x), y)
        for x, y in zip(inputs.chunk(2), target.chunk(2), strict=True)
    ]
    torch.testing.assert_close(loss.cpu(), torch.stack(expected).mean())


def test_a_batch_smaller_than_chunks_makes_fewer_micro_batches() -> None:
    model, reference = twins(Model, training=False)
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        y = flow(X[:3], chunks=8)["y"]
    torch.testing.assert_close(
        y.detach().cpu(), reference(X[:3])["y"].detach(), atol=1e-10, rtol=1e-10
    )


def test_a_loss_that_is_a_mean_is_averaged_over_the_samples() -> None:
    class Loss(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)["y"].pow(2).mean()

    model, reference = twins(Loss, training=False)
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        loss = flow(X, chunks=3)
    torch.testing.assert_close(loss.detach().cpu(), reference(X).detach(), atol=1e-10, rtol=1e-10)


class Beside(Model):
    """Returns something beside the result of its layers."""

    def __init__(self, beside: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.beside = beside

    def forward(self, x: Tensor) -> Any:
        return {"y": super().forward(x)["y"], "beside": self.beside(x)}


@pytest.mark.parametrize("constant", [lambda _: torch.tensor(4096), lambda _: 2 * torch.arange(3)])
def test_a_constant_that_every_micro_batch_returns_is_returned(
    constant: Callable[[Tensor], Tensor],
) -> None:
    # As the size of a sliding window is, which caches of transformers have in a tensor.
    with logical_devices(2):
        flow = DataFlow(Beside(constant).double().eval())
        scatter_layers(flow, 2)
        assert torch.equal(flow(X, chunks=2)["beside"].cpu(), constant(X))


@pytest.mark.covering
@pytest.mark.parametrize(
    "beside",
    [
        lambda x: (x == x).sum() // 2,
        lambda x: torch.tensor(len(x)),
        lambda x: torch.zeros(3, dtype=torch.int64).add_(len(x)),
        lambda x: x.shape[0],
        lambda x: x.shape,
        lambda x: x.numel() * 2,
        lambda x: x.shape[0] / 2,
        lambda x: x.shape[1],
        lambda x: (x.shape[0], float(x.shape[0])),
        lambda x: {"seven": 7, "of": {"samples": x.shape[0]}},
    ],
)
@pytest.mark.parametrize("chunks", [2, 3, 8])
@pytest.mark.parametrize("is_hooked", [False, True])
def test_counts_and_sizes_among_the_results_are_those_of_the_batch(
    beside: Callable[[Tensor], Any], chunks: int, is_hooked: bool
) -> None:
    model = (
        Beside(lambda x: beside(x if not is_hooked or bool(x.sum() < 100) else x * 2))
        .double()
        .eval()
    )
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        torch.testing.assert_close(flow(X, chunks=chunks)["beside"], beside(X), check_device=False)
        assert bool(flow.not_captured_because) is is_hooked


def test_numbers_that_are_drawn_are_refused() -> None:
    with logical_devices(2):
        flow = DataFlow(Beside(lambda _: torch.randint(2**40, (3,))).double().eval())
        scatter_layers(flow, 2)
        with pytest.raises(InputError, match=r"output beside is a tensor .*differs for another"):
            flow(X, chunks=2)


def test_a_number_that_those_of_micro_batches_do_not_tell_is_refused() -> None:
    with logical_devices(2):
        flow = DataFlow(Beside(lambda x: x.shape[0] + 1).double().eval())
        scatter_layers(flow, 2)
        assert flow(X)["beside"] == 9
        with pytest.raises(
            BatchError, match="output 'beside' of a batch is not what its micro-batches give: 9 and"
        ):
            flow(X, chunks=2)


def test_what_holds_for_large_micro_batches_alone_is_seen_anew_for_each_size() -> None:
    with logical_devices(2):
        flow = DataFlow(Beside(lambda x: max(x.shape[0], 3)).double().eval())
        scatter_layers(flow, 2)
        assert flow(X, chunks=2)["beside"] == 8
        for _ in range(2):
            with pytest.raises(
                BatchError, match="output 'beside' of a batch is not what its micro-batches give"
            ):
                flow(X, chunks=4)


def test_numbers_that_an_object_among_the_results_keeps_are_left_as_they_are() -> None:
    class Cache:
        def __init__(self, rows: Tensor) -> None:
            self.rows, self.window = rows, 2

    with logical_devices(2):
        flow = DataFlow(Beside(lambda x: Cache(x * int(x.sum() < 100))).double().eval())
        scatter_layers(flow, 2)
        result = flow(X, chunks=4)
    assert result["beside"].window == 2
    torch.testing.assert_close(result["beside"].rows, X)


@pytest.mark.parametrize(
    ("batch", "chunks", "sizes"), [(8, 3, [3, 3, 2]), (2, 5, [1, 1]), (7, 1, [7]), (0, 2, [0])]
)
def test_sizes_of_micro_batches_differ_by_one_at_most(
    batch: int, chunks: int, sizes: list[int]
) -> None:
    assert even_sizes(batch, chunks) == sizes
