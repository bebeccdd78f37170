from __future__ import annotations

import torch
from small_models import Skips
from torch import Tensor, nn

from placer.graph import capture
from placer.zoo import gpt


def test_an_operation_joins_the_layer_that_began_last_not_the_one_whose_by_product_was_made_last() -> None:
    # Its last line multiplies early values after the last layer has run; joining that product's layer closed a cycle
    # through all layers between, which then became one.
    graph = capture(Skips(layers=3), torch.randn(2, 5), granularity="fine")
    assert [layer.name for layer in graph.layers] == ["layers.0", "layers.1", "layers.2", "add", "norm"]


class _Weave(nn.Module):
    """Two modules whose inner operations depend on one another both ways."""

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
    graph = capture(_Weave(), torch.randn(2, 3), granularity="submodule")
    assert [layer.name for layer in graph.layers] == ["a+b", "head"]
    assert graph.layers[0].modules == ("a", "b")


def test_every_value_is_made_before_it_is_read() -> None:
    graph = capture(Skips(layers=4), torch.randn(2, 5), granularity="fine")
    made = set(graph.inputs)
    for layer in graph.layers:
        assert set(layer.reads) <= made
        made |= set(layer.writes)
    assert set(graph.outputs) <= made


def test_no_layer_is_sent_an_input_for_its_size_alone() -> None:
    # Every block asked the tokens for the batch size, so they went to the first block besides the embedding.
    graph = capture(gpt(layers=2, width=8, heads=2, context=4, vocabulary=5), torch.zeros(2, 4, dtype=torch.long))
    assert [layer.name for layer in graph.layers if graph.inputs[0] in layer.reads] == ["token_embedding"]
