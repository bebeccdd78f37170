"""Weight gradients apart from input gradients, so that a schedule can fill its bubbles with them.

    backward pass         gradient of the output  ──▶  gradient of the input
                          (the previous stage waits for it)
    weight-gradient pass  gradient of the output, input  ──▶  gradient of the weight
                          (no stage waits for it)

Linear layers and convolutions are split in this way. Until its weight-gradient pass, each of them
keeps its input and the gradient of its result. Every other operation computes the gradients of its
parameters at once.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from placer.capture import autocast

_aten = torch.ops.aten

LINEAR = _aten.linear.default
CONVOLUTIONS = {_aten.conv1d.default: 1, _aten.conv2d.default: 2, _aten.conv3d.default: 3}
"""The convolutions, with their number of dimensions."""


@dataclass(frozen=True)
class DeferredGradient:
    """A deferred part of an operation's backward pass: it adds to the gradients of its weights.

    Attributes:
        add: adds the gradients, given the queue, ``x`` and ``gradient``.
        x: the operation's input.
        gradient: the gradient of its result.
        weights: the weights whose gradients are added to.
        layer: name of the operation's layer; None if unknown.
    """

    add: Callable[[GradientQueue, Tensor, Tensor], None]
    x: Tensor
    gradient: Tensor
    weights: tuple[Tensor, ...]
    layer: str | None = None

    @torch.no_grad()
    def run(self, queue: GradientQueue) -> None:
        """Add to the gradients of the weights."""
        self.add(queue, self.x, self.gradient)

    @property
    def products(self) -> int:
        """Return the approximate number of multiplications."""
        weight = self.weights[0]
        return self.gradient.numel() * (weight.numel() // max(1, len(weight)))


class GradientQueue(list[DeferredGradient]):
    """The weight gradients to compute, in the order of the backward pass."""

    def put(self, addition: DeferredGradient) -> None:
        """Defer a computation."""
        self.append(addition)

    def gradient(self, weight: Tensor) -> Tensor | None:
        """Return the gradient to add to; None for a weight without one."""
        return weight.grad

    def accumulate(self, weight: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of a weight, which must exist."""
        total = self.gradient(weight)
        assert total is not None
        total.add_(gradient)

    def run(self) -> None:
        """Run all deferred computations."""
        for addition in self:
            addition.run(self)

    def branches(self) -> list[list[DeferredGradient]]:
        """Split the queue into two parts of about equal work that may run concurrently.

        No part adds to a gradient that the other one adds to. If they cannot be separated, the
        whole queue is the only part.
        """
        parts: tuple[list[DeferredGradient], list[DeferredGradient]] = ([], [])
        products, part_of = [0, 0], dict[int, int]()
        for addition in self:
            totals = [
                total.data_ptr()
                for weight in addition.weights
                if (total := self.gradient(weight)) is not None
            ]
            # Additions to one gradient must stay in order, in one part.
            taken = {part_of[total] for total in totals if total in part_of}
            if len(taken) > 1:
                return [list(self)]
            part = taken.pop() if taken else products.index(min(products))
            parts[part].append(addition)
            products[part] += addition.products
            part_of.update(dict.fromkeys(totals, part))
        return [part for part in parts if part]


class ImmediateQueue(GradientQueue):
    """A queue that adds weight gradients immediately, without a temporary gradient tensor."""

    def put(self, addition: DeferredGradient) -> None:
        """Run the computation now."""
        addition.run(self)


_UNSPLIT: ContextVar[bool] = ContextVar("whole", default=False)


@contextmanager
def unsplit_backward() -> Iterator[None]:
    """Split no backward pass inside.

    A checkpoint that runs a forward pass again does so without ``DeferWeightGradients``, so the
    first run must be unsplit too.
    """
    token = _UNSPLIT.set(True)
    try:
        yield
    finally:
        _UNSPLIT.reset(token)


class DeferWeightGradients(TorchFunctionMode):
    """A mode that puts weight gradients of linear layers and convolutions into a queue.

    Args:
        queue: receives an entry for each operation in the backward pass. Each entry adds to the
            weight's ``gradient`` in the queue, which must exist.
    """

    def __init__(self, queue: GradientQueue) -> None:
        super().__init__()
        self._queue = queue

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _UNSPLIT.get() or not can_defer(func, args, kwargs):
            return func(*args, **kwargs)
        if not torch.is_autocast_enabled(args[0].device.type):
            return self._split(func, *args)
        x, *rest = args
        x = autocast.cast_for_matmul(x)
        with autocast.disabled(x.device):
            return self._split(func, x, *rest)

    def _split(self, func: Any, *args: Any) -> Any:
        if func is LINEAR:
            return _Linear.apply(self._queue, *args, *[None] * (3 - len(args)))  # type: ignore[no-untyped-call]
        return _Convolution.apply(self._queue, func, *args)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias`` with shapes (..., in), (out, in), (out,)."""

    @staticmethod
    def forward(
        ctx: Any, queue: GradientQueue, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        # Saved as attributes: hooks on saved tensors, such as ``save_on_cpu``, would return copies,
        # and the queue identifies weights by identity.
        ctx.queue, ctx.weight, ctx.bias = queue, weight, bias
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        result: Tensor = LINEAR(x, *_match_dtype(x, weight, bias))
        # The product may be a view, and torch forbids writes to a view from a custom function.
        return (
            torch.ops.aten._unsafe_view.default(result, result.shape)
            if result._is_view()
            else result
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        # The loss does not depend on the result.
        if gradient is None:
            return (None,) * 4
        (x,), weight = ctx.saved_tensors, ctx.weight
        ctx.queue.put(deferred_gradient(LINEAR, x, gradient, weight, ctx.bias))
        into_x = gradient.matmul(weight.to(gradient.dtype)) if ctx.needs_input_grad[1] else None
        return None, into_x, None, None


def _match_dtype(x: Tensor, *tensors: Tensor | None) -> list[Tensor | None]:
    """Return weights in the input's dtype, which differs from theirs under autocast."""
    if tensors[0] is not None and tensors[0].dtype == x.dtype:
        return list(tensors)
    return [None if tensor is None else tensor.to(x.dtype) for tensor in tensors]


def _add_linear(
    queue: GradientQueue, x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None
) -> None:
    rows, columns = gradient.reshape(-1, gradient.shape[-1]).t(), x.reshape(-1, x.shape[-1])
    total = queue.gradient(weight)
    assert total is not None
    if total.dtype == rows.dtype:
        total.addmm_(rows, columns)
    else:
        total.add_(rows.mm(columns))
    of_bias = None if bias is None else queue.gradient(bias)
    if of_bias is not None:
        # A product with ones instead of a sum: the sum's kernel first clears counters, and each
        # such fill splits a CUDA graph.
        ones = rows.new_ones(rows.shape[1])
        if of_bias.dtype == rows.dtype:
            of_bias.addmv_(rows, ones)
        else:
            of_bias.add_(rows.mv(ones))


class _Convolution(torch.autograd.Function):
    """A convolution of any dimension, with the arguments of ATen's ``conv1d`` to ``conv3d``."""

    @staticmethod
    def forward(
        ctx: Any, queue: GradientQueue, function: Any, x: Tensor, weight: Tensor, *rest: Any
    ) -> Tensor:
        ctx.queue, ctx.weight, ctx.bias = queue, weight, rest[0] if rest else None
        ctx.function, ctx.rest = function, rest[1:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        result: Tensor = function(x, *_match_dtype(x, weight, ctx.bias), *rest[1:])
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        (x,), weight = ctx.saved_tensors, ctx.weight
        ctx.queue.put(deferred_gradient(ctx.function, x, gradient, weight, ctx.bias, ctx.rest))
        into_x = None
        if ctx.needs_input_grad[2]:
            shape = convolution_shape(ctx.function, ctx.rest)
            into_x = convolution_backward(
                gradient, x, weight, ctx.bias, shape, (True, False, False)
            )[0]
        nothing: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 3)
        return (None, None, into_x, *nothing)


def _add_convolution(
    queue: GradientQueue,
    x: Tensor,
    gradient: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: Any,
) -> None:
    has_bias = bias is not None and queue.gradient(bias) is not None
    _, into_weight, into_bias = convolution_backward(
        gradient, x, weight, bias, shape, (False, True, has_bias)
    )
    queue.accumulate(weight, into_weight)
    if bias is not None and has_bias:
        queue.accumulate(bias, into_bias)


def convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: ConvolutionShape,
    wanted: tuple[bool, bool, bool],
) -> Any:
    """Return the gradients of a convolution's input, weight and bias; unwanted ones are None.

    Args:
        gradient: the gradient of the result.
        x: the input.
        weight: the weight.
        bias: the bias; None without one.
        shape: stride, padding, dilation and groups.
        wanted: which of the three gradients to compute.
    """
    stride, padding, dilation, groups = shape
    sizes = None if bias is None else list(bias.shape)
    return torch.ops.aten.convolution_backward(
        gradient,
        x,
        weight.to(x.dtype),
        sizes,
        stride,
        padding,
        dilation,
        False,
        [0] * len(stride),
        groups,
        wanted,
    )


ConvolutionShape = tuple[list[int], list[int], list[int], int]
"""Stride, padding and dilation of a convolution in each dimension, and its groups."""


def convolution_shape(function: Any, rest: Sequence[Any]) -> ConvolutionShape:
    """Return a convolution's shape from ATen's arguments after the bias.

    Args:
        function: ``conv1d``, ``conv2d`` or ``conv3d`` of ATen.
        rest: the arguments; missing ones have ATen's defaults.
    """
    count = CONVOLUTIONS[function]
    defaults: list[Any] = [1, 0, 1, 1]
    stride, padding, dilation, groups = [*rest, *defaults[len(rest) :]]
    return _each(stride, count), _each(padding, count), _each(dilation, count), groups


def deferred_gradient(
    function: Any,
    x: Tensor,
    gradient: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rest: Sequence[Any] = (),
) -> DeferredGradient:
    """Return the deferred weight gradients of a linear layer or a convolution.

    Args:
        function: the operation.
        x: its input.
        gradient: the gradient of its result.
        weight: the weight whose gradient is added to.
        bias: the bias, likewise; None without one.
        rest: the operation's arguments after the bias.
    """
    weights = (weight,) if bias is None else (weight, bias)
    if function is LINEAR:
        return DeferredGradient(
            partial(_add_linear, weight=weight, bias=bias), x, gradient, weights
        )
    add = partial(
        _add_convolution, weight=weight, bias=bias, shape=convolution_shape(function, rest)
    )
    return DeferredGradient(add, x, gradient, weights)


def _each(value: Any, count: int) -> list[int]:
    """Return one number for each dimension; ATen repeats a single number."""
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


__all__ = [
    "DeferWeightGradients",
    "DeferredGradient",
    "GradientQueue",
    "ImmediateQueue",
    "convolution_backward",
    "convolution_shape",
    "deferred_gradient",
    "unsplit_backward",
]


def can_defer(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the weight gradients of a call can be deferred.

    Args:
        func: the operation.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    if (func is not LINEAR and func not in CONVOLUTIONS) or kwargs or not torch.is_grad_enabled():
        return False
    if args[0].dtype != args[1].dtype and not torch.is_autocast_enabled(args[0].device.type):
        # The operation raises torch's own error.
        return False
    if args[0].is_complex() or args[1].is_complex():
        # Complex gradients are conjugates, and ATen has no separate backward pass for complex
        # convolutions.
        return False
    if torch._C._functorch.get_dynamic_layer_stack_depth():
        # Inside torch.func, one call stands for many.
        return False
    bias = args[2] if len(args) > 2 else None
    return _has_gradient(args[1]) and (
        bias is None or not bias.requires_grad or _has_gradient(bias)
    )


def _has_gradient(tensor: Any) -> bool:
    """Return whether a gradient can be added to a tensor's own at any time: it exists already."""
    return (
        isinstance(tensor, Tensor)
        and tensor.is_leaf
        and tensor.requires_grad
        and tensor.grad is not None
    )
