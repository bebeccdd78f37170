"""Layers with openings: the same results, and the deferred parts are the weight gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from placer.capture.capture import capture_graph
from placer.capture.layers import LayerGraph
from placer.capture.weight_grads.compiled_layers import Product, with_openings
from placer.capture.weight_grads.deferred import GradientQueue

CPU = torch.device("cpu")


class _Several(nn.Module):
    """Two products in one layer, a write in place after one, and a norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.narrow = (
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 3, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.narrow(torch.relu_(self.norm(self.wide(x))))
        return result


class _Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
        result: Tensor = self.last(x)
        return result


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "several": (_Several, (5, 4), 2),
    "tokens": (lambda: nn.Linear(4, 3), (2, 5, 4), 1),
    "plain": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 7, 7), 1),
    "shaped": (
        lambda: nn.Conv2d(4, 6, 3, stride=2, padding=(1, 2), dilation=2, groups=2, bias=False),
        (2, 4, 9, 9),
        1,
    ),
    "line": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 7), 1),
    "volume": (lambda: nn.Conv3d(2, 3, 2, stride=2), (2, 2, 4, 4, 4), 1),
}


def _parts(model: nn.Module, x: Tensor) -> tuple[LayerGraph, list[list[Tensor]], list[Any]]:
    graph = capture_graph(model, x, granularity="submodule")
    states = [[graph.state[name] for name in layer.state] for layer in graph.layers]
    return (
        graph,
        states,
        [with_openings(layer, state) for layer, state in zip(graph.layers, states, strict=True)],
    )


def _ready(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def _run(
    graph: LayerGraph,
    states: list[list[Tensor]],
    layers: list[Any],
    x: Tensor,
    openings: list[list[Any]],
) -> tuple[Tensor, list[Any]]:
    values: dict[str, Any] = dict(zip(graph.inputs, [x], strict=True))
    given = []
    for layer, state, (run, _), own in zip(graph.layers, states, layers, openings, strict=True):
        made, items = run(CPU, state, [values[name] for name in layer.reads], own)
        values.update(zip(layer.writes, made, strict=True))
        given.append(items)
    return values[graph.outputs[0]], given


@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_are_those_of_the_model(name: str) -> None:
    make, shape, count = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    whole, x = copy.deepcopy(model), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    graph, states, layers = _parts(_ready(model), x)
    assert sum(len(products) for _, products in layers) == count
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        _, given = _run(
            graph, states, layers, x, [[None] * len(products) for _, products in layers]
        )
        model.load_state_dict(before)
    rows: list[tuple[tuple[Product, ...], Any, list[Tensor]]] = [
        (products, items, state)
        for (_, products), items, state in zip(layers, given, states, strict=True)
    ]
    openings = [
        [
            torch.zeros(product.shape(item, state), dtype=item.dtype).requires_grad_()
            for product, item in zip(p, g, strict=True)
        ]
        for p, g, state in rows
    ]
    y, given = _run(graph, states, layers, x, openings)
    (y**2).sum().backward()
    queue = GradientQueue()
    for (_, products), items, zeros, state in zip(layers, given, openings, states, strict=True):
        for product, item, zero in zip(products, items, zeros, strict=True):
            assert not item.requires_grad
            queue.put(product.deferred_gradient(item, zero.grad, state))
    weights = {id(weight) for addition in queue for weight in addition.weights}
    assert all(
        not parameter.grad.any() for parameter in model.parameters() if id(parameter) in weights
    )
    queue.run()
    other = x.detach().clone().requires_grad_()
    expected = whole(other)
    (expected**2).sum().backward()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, other.grad)
    for one, two in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
    torch.testing.assert_close(model.state_dict(), whole.state_dict())


def test_what_has_regions_or_frozen_weights_stays_closed() -> None:
    x = torch.randn(2, 4)
    _, _, layers = _parts(_ready(nn.Sequential(_Regions(), nn.Linear(4, 4))), x)
    assert [len(products) for _, products in layers] == [0, 1]
    frozen = nn.Linear(4, 4)
    frozen.weight.requires_grad_(False)
    # and those that have no gradient yet
    _, _, layers = _parts(nn.Sequential(frozen, nn.Linear(4, 4)), x)
    assert [len(products) for _, products in layers] == [0, 0]
