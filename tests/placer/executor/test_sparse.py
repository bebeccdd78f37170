"""Sparse tensors in a model: the matrix of a graph, as a buffer or as an input."""

from __future__ import annotations

import pytest
import torch
from splitting import assert_same, assert_split_equals_unsplit, scatter_layers, step, twins
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow, devices, profile
from placer.capture.layers import tensor_bytes
from placer.errors import InputError
from placer.executor.training.training_pipeline import Order
from placer.testing import logical_devices

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)
MATRIX = torch.tensor(
    [[0.5, 0, 0, 2], [0, 0, 1, 0], [3, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.float64
)


class GraphNetwork(nn.Module):
    """Both layers read one sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("edges", MATRIX.to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sparse.mm(self.edges, self.first(x).t()).t()
        return torch.sparse.mm(self.edges, self.second(x).t()).t()


class WithGivenEdges(nn.Module):
    """The matrix is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = torch.sparse.mm(edges, self.first(x).t()).t()
        return torch.sparse.mm(edges, self.second(x).t()).t()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_sparse_buffer_split_equals_unsplit(training: bool) -> None:
    assert_split_equals_unsplit(GraphNetwork, (X,), training=training)


def test_a_sparse_input_split_equals_unsplit() -> None:
    model, reference = twins(WithGivenEdges)
    edges = MATRIX.to_sparse()
    with logical_devices(3):
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        split = step(flow, model, (X, edges), {})
    assert_same(split, step(reference, reference, (X, edges), {}))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_step_with_a_sparse_buffer_gives_the_unsplit_models_gradients(schedule: Order) -> None:
    model, reference = twins(GraphNetwork)
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update(first=1, second=0)
        flow.update_flow()
        train = flow.train_step(
            lambda output, target: (output - target).pow(2).mean(), schedule=schedule
        )
        for _ in range(2):
            train(X, X.to("cpu:0"), chunks=3)
    (reference(X) - X).pow(2).mean().backward()
    for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), its.grad, atol=1e-12, rtol=1e-12)


def test_a_stream_over_a_sparse_buffer_gives_what_the_unsplit_model_gives() -> None:
    model, reference = twins(GraphNetwork, training=False)
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update(first=1, second=0)
        flow.update_flow()
        results = [result.cpu() for result in flow.stream([X, X + 1, X + 2])]
    for number, result in enumerate(results):
        torch.testing.assert_close(result, reference(X + number).detach(), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_model_with_sparse_tensors_is_measured(training: bool) -> None:
    options = {"training": training, "repeats": 1, "cache": False, "progress": False}
    buffered = profile(GraphNetwork().double(), X, ["cpu:0"], **options)
    assert len(buffered.layers) == 2
    given = profile(WithGivenEdges().double(), (X, MATRIX.to_sparse()), ["cpu:0"], **options)
    assert len(given.layers) == 2


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_a_sparse_tensor_has_the_bytes_of_its_parts(layout: str) -> None:
    sparse = getattr(
        MATRIX, {"coo": "to_sparse", "csr": "to_sparse_csr", "csc": "to_sparse_csc"}[layout]
    )()
    # five values of eight bytes; four rows or columns have five borders
    indices = 2 * 5 if layout == "coo" else 5 + 5
    assert tensor_bytes(sparse) == 8 * (5 + indices)
    (place, *_), _ = devices.addresses([MATRIX, sparse])
    assert place == MATRIX.data_ptr()
    assert devices.addresses([sparse]) != devices.addresses([sparse.clone()])


def test_a_sparse_input_is_trained_on_whole_and_not_cut() -> None:
    model, reference = twins(WithGivenEdges)
    x, edges = X[:4], MATRIX.to_sparse()  # as long as the batch
    target = torch.zeros_like(x)
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        train = flow.train_step(functional.mse_loss)
        with pytest.raises(
            InputError, match=r"is torch.sparse_coo, which cannot be cut.*to_dense\(\), or chunks=1"
        ):
            train((x, edges), target, chunks=2)
        for _ in range(2):
            train((x, edges), target, chunks=1)
    functional.mse_loss(reference(x, edges), target).backward()
    for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), its.grad, atol=1e-12, rtol=1e-12)
