from __future__ import annotations

import copy

import pytest
import torch
from small_models import Skips
from splitting import assert_split_equals_unsplit
from torch import Tensor, nn
from torch.nn import functional

from placer.capture import capture_graph
from placer.zoo import gpt


def test_an_operation_joins_the_layer_that_began_last_not_the_latest_by_product() -> None:
    # Its last line multiplies early values after the last layer has run; joining that product's
    # layer closed a cycle through all layers between, which then became one.
    graph = capture_graph(Skips(layers=3), torch.randn(2, 5), granularity="fine")
    assert [layer.name for layer in graph.layers] == [
        "layers.0",
        "layers.1",
        "layers.2",
        "add",
        "norm",
    ]


class _Weave(nn.Module):
    """Two modules whose inner operations depend on one another in both directions."""

    class _Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = self._Half(), self._Half(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b.second(self.a.second(self.b.first(self.a.first(x)))))


def test_layers_that_depend_on_one_another_both_ways_become_one() -> None:
    graph = capture_graph(_Weave(), torch.randn(2, 3), granularity="submodule")
    assert [layer.name for layer in graph.layers] == ["a+b", "head"]
    assert graph.layers[0].modules == ("a", "b")


def test_every_value_is_made_before_it_is_read() -> None:
    graph = capture_graph(Skips(layers=4), torch.randn(2, 5), granularity="fine")
    made = set(graph.inputs)
    for layer in graph.layers:
        assert set(layer.reads) <= made
        made |= set(layer.writes)
    assert set(graph.outputs) <= made


def test_no_layer_is_sent_an_input_for_its_size_alone() -> None:
    # Every block asked the tokens for the batch size, so they went to the first block besides the
    # embedding.
    graph = capture_graph(
        gpt(layers=2, width=8, heads=2, context=4, vocabulary=5),
        torch.zeros(2, 4, dtype=torch.long),
    )
    assert [layer.name for layer in graph.layers if graph.inputs[0] in layer.reads] == [
        "token_embedding"
    ]


class _Masked(nn.Module):
    """Blocks that read a common mask, to which their parts write."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones_like(x[0])
        mask[1:] = 0
        for block in self.blocks:
            x = block(x) * mask
        return x


class _Biased(nn.Module):
    """Blocks that each clear a part of a copy of their bias without reading the result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            bias = block.bias.clone()
            bias[1:].zero_()
            x = functional.linear(block(x), block.weight, bias)
        return x


class _WithItsLoss(nn.Module):
    """A model whose blocks each take the size of the input that has the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5)])

    def forward(self, x: Tensor) -> Tensor:
        count, labels, y = len(x), x[:, 1:], x[:, :-1]
        for block in self.blocks:
            y = block(y).reshape(count, 5, -1)
        return functional.cross_entropy(y.reshape(-1, 5), labels.reshape(-1))


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (_Masked(), torch.randn(2, 4, 3)),
        (_Biased(), torch.randn(2, 3)),
        (_WithItsLoss(), torch.randint(5, (4, 6))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_several_layers_read_does_not_make_one_layer_of_them(
    model: nn.Module, x: Tensor
) -> None:
    graph = capture_graph(model, x, granularity="fine")
    assert [layer.name for layer in graph.layers] == ["blocks.0", "blocks.1", "blocks.2"]
    x = x.double() if x.is_floating_point() else x
    assert_split_equals_unsplit(lambda: copy.deepcopy(model), (x,), kinds=("fine",))


class _Counts(nn.Module):
    """Layers that each read a number that the caller keeps for them, and then add to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor, counts: list[Tensor]) -> Tensor:
        for layer, count in zip(self.layers, counts, strict=True):
            x = layer(x) + torch.ones(3, device=x.device) * count
            count.add_(1)
        return x


def test_a_write_that_nobody_reads_stays_with_those_who_read_before_it() -> None:
    """Such writes once joined the first layer, which closed a cycle.

    So a decoder with a static cache became one layer.
    """
    counts = [torch.zeros(()) for _ in range(4)]
    graph = capture_graph(_Counts(), (torch.randn(2, 3), counts), granularity="fine")
    assert [layer.name for layer in graph.layers] == [f"layers.{number}" for number in range(4)]


class _Views(nn.Module):
    """Blocks that write to parts of one buffer, and therefore are one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(24, 3))
        for number in range(24):
            setattr(self, f"a_block_with_a_rather_long_name_{number:04}", nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.children()):
            x = layer(x)
            self.kept[number] = x[0].detach()
        return x + self.kept.sum(0)


def test_a_layer_that_was_merged_of_many_modules_names_them_all() -> None:
    """Names of over 400 characters once lost middle parts, which then had no device."""
    graph = capture_graph(_Views(), torch.randn(2, 3), granularity="fine")
    merged = max(graph.layers, key=lambda layer: len(layer.name))
    assert len(merged.name) > 400
    assert merged.name.split("+") == list(merged.modules)
