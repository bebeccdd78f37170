"""Deferred weight gradients in layers that a compiler traces.

A compiler cannot trace a queue. So each product, a linear layer or a convolution, has an opening:
zeros in the shape of its result, as if they were added to it. The gradient of the opening equals
the gradient of the result. So the compiled backward pass computes the gradients that earlier layers
need, and returns the gradients of all products:

    result = product(x, weight) + opening

    backward pass         gradient of x, gradient of the opening
    weight-gradient pass  gradient of the weight, from x and the gradient of the opening
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from placer.capture.layers import Layer
from placer.capture.weight_grads.deferred import (
    CONVOLUTIONS,
    LINEAR,
    DeferredGradient,
    can_defer,
    convolution_backward,
    convolution_shape,
    deferred_gradient,
)

OpenedFunction = Callable[
    [torch.device, Sequence[Tensor], Sequence[Any], Sequence[Any]], tuple[Any, Any]
]
"""``function(device, state, reads, openings) -> (writes, given)``; ``given``: each product's x."""


@dataclass(frozen=True)
class Product:
    """A linear layer or convolution in a layer.

    Attributes:
        function: the operation.
        weight: position of the weight in the layer's state.
        bias: position of the bias; None without one.
        rest: the arguments after the bias: stride, padding, dilation and groups of a convolution.
    """

    function: Any
    weight: int
    bias: int | None
    rest: tuple[Any, ...]

    def shape(self, x: Tensor, state: Sequence[Tensor]) -> torch.Size:
        """Return the shape of the result.

        Args:
            x: the input.
            state: the layer's state.
        """
        x, weight = (torch.empty_like(tensor, device="meta") for tensor in (x, state[self.weight]))
        result: Tensor = self.function(x, weight, None, *self.rest)
        return result.shape

    def deferred_gradient(
        self, x: Tensor, gradient: Tensor, state: Sequence[Tensor]
    ) -> DeferredGradient:
        """Return the weight-gradient computation for a given gradient of the result.

        Args:
            x: the input.
            gradient: the gradient of the result.
            state: the layer's state.
        """
        bias = None if self.bias is None else state[self.bias]
        return deferred_gradient(self.function, x, gradient, state[self.weight], bias, self.rest)


def with_openings(
    layer: Layer, state: Sequence[Tensor]
) -> tuple[OpenedFunction, tuple[Product, ...]]:
    """Return a layer as a function with an opening for each of its products.

    A layer stays unchanged, without products, if it calls modules or has regions (no_grad,
    autocast).

    Args:
        layer: the layer.
        state: the tensors that it will use; only trained weights get openings.
    """
    products: list[Product] = []
    if layer.program is None or any(
        node.op == "get_attr" or _changes_region(node) for node in layer.program.nodes
    ):
        return _without_openings(layer), ()
    graph = fx.Graph()
    places = [node for node in layer.program.nodes if node.op == "placeholder"]
    env: dict[fx.Node, Any] = {node: graph.node_copy(node) for node in places}
    openings = graph.placeholder("openings")
    # State comes after device and regions.
    position = {node: index for index, node in enumerate(places[2 : 2 + len(layer.state)])}
    given = []
    for node in layer.program.nodes:
        product = _product(node, position, state)
        if product is not None:
            opening = graph.call_function(operator.getitem, (openings, len(products)))
            x, weight, bias = (
                None if item is None else env[item] for item in [*node.args, None][:3]
            )
            env[node] = graph.call_function(
                _apply_with_opening, (product.function, x, weight, bias, opening, *product.rest)
            )
            products.append(product)
            # The weight-gradient pass computes with this input later, outside of the graph.
            given.append(graph.call_method("detach", (x,)))
        elif node.op not in ("placeholder", "output"):
            env[node] = graph.node_copy(node, env.__getitem__)
    made = fx.node.map_arg(layer.program.output_node().args[0], env.__getitem__)
    graph.output((made, tuple(given)))
    module = fx.GraphModule(layer.program.owning_module or torch.nn.Module(), graph)

    def run(
        device: torch.device, state: Sequence[Tensor], reads: Sequence[Any], openings: Sequence[Any]
    ) -> Any:
        return module(device, None, *state, *reads, openings)

    return run, tuple(products)


def _without_openings(layer: Layer) -> OpenedFunction:
    def run(
        device: torch.device, state: Sequence[Tensor], reads: Sequence[Any], openings: Sequence[Any]
    ) -> Any:
        return layer.function(device, list(state), list(reads)), ()

    return run


def _changes_region(node: fx.Node) -> bool:
    return getattr(node.target, "__module__", "") == "placer.capture.export.mode_regions"


def _product(
    node: fx.Node, position: Mapping[fx.Node, int], state: Sequence[Tensor]
) -> Product | None:
    """Return the product that a node is, or None if its weight gradients cannot be deferred."""
    if node.target is not LINEAR and node.target not in CONVOLUTIONS:
        return None
    # The weight must be the layer's own state: the gradient of a computed weight must flow further
    # back.
    weight, bias = (
        cast(fx.Node, node.args[1]),
        cast(fx.Node | None, node.args[2] if len(node.args) > 2 else None),
    )
    if weight not in position or not (bias is None or bias in position):
        return None
    where = position[weight], None if bias is None else position[bias]
    tensors = [None if index is None else state[index] for index in where]
    with torch.enable_grad():
        waits = can_defer(node.target, (tensors[0], *tensors), node.kwargs)
    return Product(node.target, *where, node.args[3:]) if waits else None


def _apply_with_opening(
    function: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    opening: Tensor | None,
    *rest: Any,
) -> Any:
    bias = None if bias is None else bias.detach()
    if function is LINEAR:
        return _OpenLinear.apply(x, weight.detach(), bias, opening)  # type: ignore[no-untyped-call]
    return _OpenConvolution.apply(x, weight.detach(), bias, opening, function, *rest)  # type: ignore[no-untyped-call]


class _OpenLinear(torch.autograd.Function):
    """``x @ weight.T + bias`` with an opening."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, opening: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(weight)
        result: Tensor = LINEAR(x, weight, bias)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (weight,) = gradients, ctx.saved_tensors
        return gradient.matmul(weight) if ctx.needs_input_grad[0] else None, None, None, gradient


class _OpenConvolution(torch.autograd.Function):
    """A convolution with an opening."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        opening: Tensor | None,
        function: Any,
        *rest: Any,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.function, ctx.rest = function, rest
        result: Tensor = function(x, weight, bias, *rest)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        into_x = None
        if ctx.needs_input_grad[0]:
            shape = convolution_shape(ctx.function, ctx.rest)
            into_x = convolution_backward(gradient, x, weight, None, shape, (True, False, False))[0]
        nothing: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 4)
        return (into_x, None, None, gradient, *nothing)
