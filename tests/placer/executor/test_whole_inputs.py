"""Inputs that are as long as the batch by chance: every micro-batch is given all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from counted_captures import count_captures
from splitting import scatter_layers, twins
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow
from placer.testing import logical_devices

B = 4  # samples, and length of a sequence, and rows of a table
X = torch.linspace(-1, 1, B * B * 8, dtype=torch.float64).reshape(B, B, 8)
SQUARE = torch.linspace(-2, 2, B * B, dtype=torch.float64).reshape(B, B)
WEIGHTS = torch.linspace(0.5, 2, B, dtype=torch.float64)


class Attention(nn.Module):
    """The mask is added to squares of tokens, the weights are of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        x = self.first(x)
        result: Tensor = self.last((x @ x.mT + mask).softmax(-1) @ x) * weights[:, None, None]
        return result


class Lookup(nn.Module):
    """What is looked up in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, indices: Tensor, table: Tensor, labels: Any = None) -> Any:
        result = self.last(self.first(functional.embedding(indices, table)).relu())
        return result if labels is None else (result, labels)


class Heads(nn.Module):
    """The mask is one of all heads, and given to torch's attention; there is one weight for each
    class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, B)

    def forward(self, x: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        x = self.first(x)
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, (mask > 0)[None, None])
        mixed = mixed + functional.scaled_dot_product_attention(heads, heads, heads, mask)
        result: Tensor = self.last(mixed.transpose(1, 2).flatten(2)) * weights
        return result[..., :2]


class Padded(nn.Module):
    """Rows of the mask are picked by their numbers, as transformers does: nothing ties it to the
    batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, tokens = torch.arange(x.shape[0]), torch.arange(x.shape[1])
        result: Tensor = self.last(self.first(x) * mask[rows[:, None], tokens[None]][..., None])
        return result


class Scattered(nn.Module):
    """What is made of images takes the places of some tokens, one sample after another; they are
    returned, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.images, self.last = nn.Embedding(B, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, tokens: Tensor, images: Tensor) -> Any:
        x, images = self.first(tokens), self.images(images)
        return self.last(x.masked_scatter((tokens == 1)[..., None].expand_as(x), images)), images


class Listed(Scattered):
    """Iterates over the images, so that the graph fixes their number; returns none of them."""

    def forward(self, tokens: Tensor, images: Tensor) -> Any:
        return super().forward(tokens, torch.stack(list(images)))[0]


class Ensemble(nn.Module):
    """One weight for each member, taken by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(8, 2) for _ in range(B))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        parts = [weight * member(x) for weight, member in zip(weights, self.members, strict=True)]
        return sum(parts[1:], parts[0])


class Positions(nn.Module):
    """Embeds position numbers by lookup, and their ages by sine waves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.last = nn.Linear(8, 8), nn.Embedding(9, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, ages: Tensor, positions: Tensor) -> Tensor:
        x = self.first(x) + self.table(positions)[None]
        waves = torch.outer(ages, torch.ones(8, dtype=x.dtype)).cos()
        result: Tensor = self.last(x * waves)
        return result


class Mixed(nn.Module):
    """An adjacency matrix of the nodes, which all samples have, and one that mixes what a layer
    made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, B), nn.Linear(B, 2)

    def forward(self, x: Tensor, adjacency: Tensor, mix: Tensor) -> Tensor:
        x = adjacency @ torch.relu(self.first(x))
        result: Tensor = self.last(
            torch.einsum("bnk,km->bnm", x, mix) @ mix + functional.linear(x, mix)
        )
        return result


PARTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "padded": (Padded, lambda: (X, torch.tril(torch.ones(B, B, dtype=torch.float64)))),
    "scattered": (Scattered, lambda: (torch.tensor([[1, 0, 1, 2, 3]] * B), X[:, :2])),
    "listed": (Listed, lambda: (torch.tensor([[1, 0, 1, 2, 3]] * B), X[:, :2])),
}


INPUTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "mask": (Attention, lambda: (X, SQUARE, WEIGHTS)),
    "heads": (Heads, lambda: (X, SQUARE + 2 * torch.eye(B, dtype=torch.float64), WEIGHTS)),
    "table": (Lookup, lambda: (torch.arange(2 * B).reshape(B, 2) % B, X[0].clone())),
    "ensemble": (Ensemble, lambda: (X, WEIGHTS)),
    "positions": (Positions, lambda: (X, WEIGHTS, torch.arange(B))),
    "mixed": (Mixed, lambda: (X, SQUARE, SQUARE.cos())),
}


@pytest.fixture(params=INPUTS)
def case(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[nn.Module, nn.Module, tuple[Tensor, ...]]]:
    """A model, its twin and what they are given, where there are three stand-ins."""
    make, inputs = INPUTS[request.param]
    model, reference = twins(make, training=True)
    with logical_devices(3):
        yield model, reference, tuple(tensor.clone() for tensor in inputs())


def placed(model: nn.Module, **options: Any) -> DataFlow:
    flow = DataFlow(model, **options)
    scatter_layers(flow, 3)
    return flow


@pytest.mark.covering
@pytest.mark.parametrize("chunks", [2, 3, B])
@pytest.mark.parametrize("options", [{}, {"enable_clone": True}], ids=["", "clone"])
def test_a_call_in_micro_batches_gives_what_the_unsplit_model_gives(
    case: tuple[nn.Module, nn.Module, tuple[Tensor, ...]], chunks: int, options: dict[str, Any]
) -> None:
    model, reference, inputs = case
    model.eval()
    expected = reference(*inputs)
    with torch.no_grad():
        result = placed(model, **options)(*inputs, chunks=chunks)
    torch.testing.assert_close(result.cpu(), expected.detach().cpu())


@pytest.mark.covering(every=10)
@pytest.mark.parametrize("chunks", [2, 3, B])
@pytest.mark.parametrize("whole_needs_a_gradient", [False, True])
def test_a_step_in_micro_batches_makes_the_gradients_of_the_unsplit_model(
    case: tuple[nn.Module, nn.Module, tuple[Tensor, ...]], chunks: int, whole_needs_a_gradient: bool
) -> None:
    model, reference, inputs = case
    theirs = [tensor.clone() for tensor in inputs]
    for given in (inputs, theirs):
        given[1].requires_grad_(whole_needs_a_gradient)
    flow = placed(model)
    step = flow.train_step(lambda result, target: functional.mse_loss(result, target))
    target = torch.zeros(*inputs[0].shape[:2], 2, dtype=torch.float64)
    loss = step(tuple(inputs), target, chunks=chunks)
    expected = functional.mse_loss(reference(*theirs), target)
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected.detach().cpu())
    for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), other.grad.cpu())
    if whole_needs_a_gradient:
        torch.testing.assert_close(inputs[1].grad.cpu(), theirs[1].grad.cpu())


@pytest.mark.covering
@pytest.mark.parametrize("chunks", [2, 3, B])
@pytest.mark.parametrize("name", PARTS)
def test_what_nothing_in_the_graph_ties_to_another_size_is_a_part_of_the_batch(
    name: str, chunks: int
) -> None:
    """A padding mask went whole to every micro-batch: all were computed with the first samples'
    rows."""
    make, inputs = PARTS[name]
    model, reference = twins(make, training=True)
    given, target = inputs(), torch.zeros(B)

    def loss_fn(result: Any, target: Tensor) -> Tensor:
        parts = result if isinstance(result, tuple) else (result,)
        loss: Tensor = sum(
            (part.square().mean((1, 2)).mean() for part in parts),
            torch.zeros((), dtype=torch.float64),
        )
        return loss

    with logical_devices(3):
        flow = placed(model)
        with torch.no_grad():
            found = flow(*given, chunks=chunks)
        torch.testing.assert_close(found, reference(*given), check_device=False)
        loss = flow.train_step(loss_fn)(given, target, chunks=chunks)
        expected = loss_fn(reference(*given), target)
        expected.backward()
    torch.testing.assert_close(loss.cpu(), expected.detach().cpu())
    for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), other.grad.cpu())


def test_one_capture_tells_it_and_serves_the_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attention().double()
    captures = count_captures(monkeypatch)
    with logical_devices(3):
        flow = placed(model)
        for _ in range(3):
            flow(X, SQUARE, WEIGHTS, chunks=2)
    assert len(captures) == 1


def test_a_batch_in_inference_is_measured_in_micro_batches() -> None:
    model = Attention().double().eval()
    with logical_devices(3):
        assert placed(model).measure((X, SQUARE, WEIGHTS), chunks=2).rows


def test_what_is_only_returned_is_a_part_of_the_batch() -> None:
    model = Lookup().double()
    indices, labels = torch.arange(2 * B).reshape(B, 2) % B, torch.arange(B)
    with logical_devices(3):
        result, same = placed(model)(indices, X[0], labels, chunks=2)
    torch.testing.assert_close(result.cpu(), model.cpu()(indices, X[0]))
    assert same.tolist() == labels.tolist()


class Returned(Lookup):
    def forward(self, indices: Tensor, table: Tensor, labels: Any = None) -> Any:
        return super().forward(indices, table), table


def test_a_table_that_is_returned_too_is_returned_once() -> None:
    model = Returned().double()
    indices, table = torch.arange(2 * B).reshape(B, 2) % B, X[0].clone()
    with logical_devices(3):
        result, same = placed(model)(indices, table, chunks=2)
    torch.testing.assert_close(result.cpu(), model.cpu()(indices, table)[0])
    assert torch.equal(same.cpu(), table)
