from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from splitting import scatter_layers, twins
from torch import Tensor, nn

from placer import DataFlow
from placer.errors import InputError
from placer.executor.joining import Kind, Output, gather
from placer.executor.pipeline import clock, scatter
from placer.testing import logical_devices

X = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return {"y": self.last(torch.relu(self.norm(self.first(x)))), "size": 3}


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
    torch.testing.assert_close(result["y"].detach().cpu(), expected.detach(), atol=1e-10, rtol=1e-10)
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
def test_results_of_a_model_whose_graph_holds_for_one_size_are_joined(make: type[nn.Module]) -> None:
    model, reference = twins(make, training=False)
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        result = flow(X, chunks=2)
    assert not flow.not_captured_because
    torch.testing.assert_close(result.cpu(), torch.cat([reference(part) for part in X.chunk(2)]))


def test_a_step_says_that_a_smaller_last_micro_batch_would_have_another_graph() -> None:
    model, reference = twins(_OfOneSize)
    inputs, target = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        step = flow.train_step(nn.functional.mse_loss)
        with pytest.warns(UserWarning, match="2 of 4, not 3; a batch whose size 3 divides keeps them"):
            loss = step(inputs, target, chunks=3)
    expected = [nn.functional.mse_loss(reference(x), y) for x, y in zip(inputs.chunk(2), target.chunk(2), strict=True)]
    torch.testing.assert_close(loss.cpu(), torch.stack(expected).mean())


def test_a_batch_smaller_than_chunks_makes_fewer_micro_batches() -> None:
    model, reference = twins(Model, training=False)
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        y = flow(X[:3], chunks=8)["y"]
    torch.testing.assert_close(y.detach().cpu(), reference(X[:3])["y"].detach(), atol=1e-10, rtol=1e-10)


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


def test_an_output_without_a_batch_dimension_is_refused_with_the_way_out() -> None:
    class Means(Model):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x)["y"].mean(dim=0)

    with logical_devices(2):
        flow = DataFlow(Means().double().eval())
        scatter_layers(flow, 2)
        with pytest.raises(InputError, match="chunks=1"):
            flow(X, chunks=2)
        assert flow(X).shape == (2,)


class Beside(Model):
    """Returns something beside the result of its layers."""

    def __init__(self, beside: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.beside = beside

    def forward(self, x: Tensor) -> Any:
        return {"y": super().forward(x)["y"], "beside": self.beside(x)}


@pytest.mark.parametrize("constant", [lambda _: torch.tensor(4096), lambda _: 2 * torch.arange(3)])
def test_a_constant_that_every_micro_batch_returns_is_returned(constant: Callable[[Tensor], Tensor]) -> None:
    # As the size of a sliding window is, which caches of transformers have in a tensor.
    with logical_devices(2):
        flow = DataFlow(Beside(constant).double().eval())
        scatter_layers(flow, 2)
        assert torch.equal(flow(X, chunks=2)["beside"].cpu(), constant(X))


@pytest.mark.parametrize(
    "beside",
    [
        lambda x: (x == x).sum() // 2,
        lambda x: torch.tensor(len(x)),
        lambda x: torch.zeros(3, dtype=torch.int64).add_(len(x)),
        lambda _: torch.randint(2**40, (3,)),
    ],
    ids=["count", "size", "size written", "drawn"],
)
def test_what_is_alike_in_micro_batches_and_no_constant_is_refused(beside: Callable[[Tensor], Tensor]) -> None:
    with logical_devices(2):
        flow = DataFlow(Beside(beside).double().eval())
        scatter_layers(flow, 2)
        with pytest.raises(InputError, match=r"\['beside'\] has no batch dimension"):
            flow(X, chunks=2)


@pytest.mark.parametrize(
    "beside",
    [lambda x: x.shape[0], lambda x: x.shape, lambda x: x.numel() * 2, lambda x: x.shape[0] / 2, lambda x: x.shape[1]],
    ids=["samples", "shape", "numbers", "half", "features"],
)
@pytest.mark.parametrize("chunks", [2, 3])
def test_sizes_among_the_results_are_those_of_the_batch(beside: Callable[[Tensor], Any], chunks: int) -> None:
    model = Beside(beside).double().eval()
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        assert flow(X, chunks=chunks)["beside"] == beside(X)


@pytest.mark.parametrize("beside", [lambda x: x.shape[0] + 1, lambda x: max(x.shape[0], 6), lambda x: x.shape[0] // 2])
def test_numbers_that_those_of_micro_batches_do_not_tell_are_refused(beside: Callable[[Tensor], Any]) -> None:
    with logical_devices(2):
        flow = DataFlow(Beside(beside).double().eval())
        scatter_layers(flow, 2)
        assert flow(X)["beside"] == beside(X)
        with pytest.raises(InputError, match=r"\['beside'\] is a number that follows from how many samples"):
            flow(X, chunks=2)


@pytest.mark.parametrize("chunks", [2, 3])
def test_a_size_of_a_graph_that_holds_for_one_size_is_refused(chunks: int) -> None:
    with logical_devices(2):
        flow = DataFlow(Beside(lambda x: (x.shape[0], float(x.shape[0]))).double().eval())
        scatter_layers(flow, 2)
        assert flow(X)["beside"] == (8, 8)
        with pytest.raises(InputError, match=r"\['beside'\]\[0\] is a number that follows from how many samples"):
            flow(X, chunks=chunks)


@pytest.mark.parametrize(("is_hooked", "chunks"), [(True, 2), (True, 3), (True, 8), (False, 8)])
def test_what_may_be_a_size_is_refused_where_no_graph_tells(is_hooked: bool, chunks: int) -> None:
    # A graph tells, but of micro-batches of one sample, whose size torch fixes; there the batch's does.
    def beside(x: Tensor) -> Any:
        return {"seven": 7, "of": {"samples": x.shape[0]}, "any": is_hooked and bool(x.sum() > 100)}

    with logical_devices(2):
        flow = DataFlow(Beside(beside).double().eval())
        scatter_layers(flow, 2)
        assert flow(X)["beside"]["of"]["samples"] == 8
        assert bool(flow.not_captured_because) is is_hooked
        told = r"\['of'\]\['samples'\] is \d, which may be how many samples" if is_hooked else "choose chunks by which"
        with pytest.raises(InputError, match=told):
            flow(X, chunks=chunks)


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


@pytest.mark.parametrize(("segments", "chunks"), [(1, 1), (3, 1), (1, 4), (3, 5), (5, 2)])
def test_the_clock_issues_every_pair_once_after_what_it_needs(segments: int, chunks: int) -> None:
    issued = list(clock(segments, chunks))
    assert sorted(issued) == [(segment, chunk) for segment in range(segments) for chunk in range(chunks)]
    for segment, chunk in issued:
        if segment:
            assert issued.index((segment - 1, chunk)) < issued.index((segment, chunk))


def test_scatter_cuts_batched_inputs_and_hands_the_others_to_all() -> None:
    table, number = torch.ones(3, 3), 5
    parts = scatter([X, table, number], 3, 8)
    assert [len(part[0]) for part in parts] == [3, 3, 2]
    assert all(part[1] is table and part[2] == 5 for part in parts)


def test_gather_keeps_what_all_micro_batches_share() -> None:
    table = torch.ones(3)
    assert gather([table, table], Output(Kind.WHOLE), [1, 1], "") is table
    assert gather([4, 4], Output(Kind.WHOLE), [1, 1], "") == 4
