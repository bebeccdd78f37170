"""Weight gradients apart from input gradients, so that a schedule can fill its bubbles with them.

    backward pass      gradient of the output  ──▶  gradient of the input      what the stage before waits for
    weights pass       gradient of the output, input  ──▶  gradient of the weight      what nobody waits for

Linear layers and convolutions are split so; every other operation gives its parameters their
gradients at once.

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
from placer.capture.weight_grads.splittable_ops import CONVOLUTIONS, LINEAR, can_wait


@dataclass(frozen=True)
class Addition:
    """What is left for later of an operation's backward pass: it adds to the gradients of its
    weights.

    Attributes:
        add: does it, given the queue that it is in, ``x`` and ``gradient``.
        x: what the operation was given.
        gradient: of its result.
        weights: those whose gradients are added to.
        layer: that the operation is in, where that is known.
    """

    add: Callable[[Queue, Tensor, Tensor], None]
    x: Tensor
    gradient: Tensor
    weights: tuple[Tensor, ...]
    layer: str | None = None

    @torch.no_grad()
    def run(self, queue: Queue) -> None:
        """Add."""
        self.add(queue, self.x, self.gradient)

    @property
    def products(self) -> int:
        """About how many numbers are multiplied."""
        weight = self.weights[0]
        return self.gradient.numel() * (weight.numel() // max(1, len(weight)))


class Queue(list[Addition]):
    """The weight gradients that are still to be computed, in the order in which the backward pass
    met them.
    """

    def put(self, addition: Addition) -> None:
        """Leave something for later."""
        self.append(addition)

    def gradient(self, weight: Tensor) -> Tensor | None:
        """What is added to; None for a weight that has no gradient."""
        return weight.grad

    def accumulate(self, weight: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of a weight, which must be there."""
        total = self.gradient(weight)
        assert total is not None
        total.add_(gradient)

    def run(self) -> None:
        """Do all that was left."""
        for addition in self:
            addition.run(self)

    def branches(self) -> list[list[Addition]]:
        """All in two parts with about as much to do, which may run side by side: none adds to what
        the other does.
        """
        parts: tuple[list[Addition], list[Addition]] = ([], [])
        products, part_of = [0, 0], dict[int, int]()
        for addition in self:
            totals = [
                total.data_ptr()
                for weight in addition.weights
                if (total := self.gradient(weight)) is not None
            ]
            taken = {part_of[total] for total in totals if total in part_of}
            if len(taken) > 1:
                return [list(self)]
            part = taken.pop() if taken else products.index(min(products))
            parts[part].append(addition)
            products[part] += addition.products
            part_of.update(dict.fromkeys(totals, part))
        return [part for part in parts if part]


class AtOnce(Queue):
    """Weight gradients that are not left for later: a product is added as it is made, and no
    gradient more is.
    """

    def put(self, addition: Addition) -> None:
        """Do it now."""
        addition.run(self)


_WHOLE: ContextVar[bool] = ContextVar("whole", default=False)


@contextmanager
def whole() -> Iterator[None]:
    """Inside, no backward pass is split: what runs again in one does so without ``DeferWeights``,
    and must be alike.
    """
    token = _WHOLE.set(True)
    try:
        yield
    finally:
        _WHOLE.reset(token)


class DeferWeights(TorchFunctionMode):
    """Inside, the backward passes of linear layers and convolutions put their weight gradients into
    a queue.

    Args:
        queue: is filled while the backward pass runs; every entry adds to its ``gradient`` of the
            weight, which must be there.
    """

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self._queue = queue

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _WHOLE.get() or not can_wait(func, args, kwargs):
            return func(*args, **kwargs)
        if not torch.is_autocast_enabled(args[0].device.type):
            return self._split(func, *args)
        x, *rest = args
        x = autocast.cast(x)
        with autocast.off(x.device):
            return self._split(func, x, *rest)

    def _split(self, func: Any, *args: Any) -> Any:
        if func is LINEAR:
            return _Linear.apply(self._queue, *args, *[None] * (3 - len(args)))  # type: ignore[no-untyped-call]
        return _Convolution.apply(self._queue, func, *args)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias`` with shapes (..., in), (out, in), (out,)."""

    @staticmethod
    def forward(ctx: Any, queue: Queue, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Weights are told by what they are: hooks of saved tensors, as of ``save_on_cpu``, would
        # give others back.
        ctx.queue, ctx.weight, ctx.bias = queue, weight, bias
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        result: Tensor = LINEAR(x, *_like(x, weight, bias))
        # As a view of the product, which it may be, nobody could write to it: it comes from a
        # function of its own.
        return (
            torch.ops.aten._unsafe_view.default(result, result.shape)
            if result._is_view()
            else result
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:  # the loss does not depend on the result
            return (None,) * 4
        (x,), weight = ctx.saved_tensors, ctx.weight
        ctx.queue.put(left_for_later(LINEAR, x, gradient, weight, ctx.bias))
        into_x = gradient.matmul(weight.to(gradient.dtype)) if ctx.needs_input_grad[1] else None
        return None, into_x, None, None


def _like(x: Tensor, *tensors: Tensor | None) -> list[Tensor | None]:
    """Weights in the type of what they meet; under autocast it is another than their own."""
    if tensors[0] is not None and tensors[0].dtype == x.dtype:
        return list(tensors)
    return [None if tensor is None else tensor.to(x.dtype) for tensor in tensors]


def _add_linear(
    queue: Queue, x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None
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
        # As a product with ones: a sum's kernel clears counters first, and every such fill cuts a
        # CUDA graph in two.
        ones = rows.new_ones(rows.shape[1])
        if of_bias.dtype == rows.dtype:
            of_bias.addmv_(rows, ones)
        else:
            of_bias.add_(rows.mv(ones))


class _Convolution(torch.autograd.Function):
    """A convolution of any dimension, as ATen's ``conv1d`` to ``conv3d`` take their arguments."""

    @staticmethod
    def forward(
        ctx: Any, queue: Queue, function: Any, x: Tensor, weight: Tensor, *rest: Any
    ) -> Tensor:
        ctx.queue, ctx.weight, ctx.bias = queue, weight, rest[0] if rest else None
        ctx.function, ctx.rest = function, rest[1:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        result: Tensor = function(x, *_like(x, weight, ctx.bias), *rest[1:])
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        (x,), weight = ctx.saved_tensors, ctx.weight
        ctx.queue.put(left_for_later(ctx.function, x, gradient, weight, ctx.bias, ctx.rest))
        into_x = None
        if ctx.needs_input_grad[2]:
            shape = shape_of(ctx.function, ctx.rest)
            into_x = convolution_backward(
                gradient, x, weight, ctx.bias, shape, (True, False, False)
            )[0]
        nothing: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 3)
        return (None, None, into_x, *nothing)


def _add_convolution(
    queue: Queue, x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None, shape: Any
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
    shape: Shape,
    wanted: tuple[bool, bool, bool],
) -> Any:
    """Gradients of what a convolution was given, of its weight and of its bias; those that are not
    wanted are None.
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


Shape = tuple[list[int], list[int], list[int], int]
"""Stride, padding and dilation of a convolution in each dimension, and its groups."""


def shape_of(function: Any, rest: Sequence[Any]) -> Shape:
    """A convolution's shape, from what ATen is given behind the bias."""
    count = CONVOLUTIONS[function]
    defaults: list[Any] = [1, 0, 1, 1]
    stride, padding, dilation, groups = [*rest, *defaults[len(rest) :]]
    return _each(stride, count), _each(padding, count), _each(dilation, count), groups


def left_for_later(
    function: Any,
    x: Tensor,
    gradient: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rest: Sequence[Any] = (),
) -> Addition:
    """The weight gradients of a linear layer or a convolution.

    Args:
        function: which of them.
        x: what it was given.
        gradient: of its result.
        weight: whose gradient is added to.
        bias: likewise.
        rest: what the function was given behind the bias.
    """
    weights = (weight,) if bias is None else (weight, bias)
    if function is LINEAR:
        return Addition(partial(_add_linear, weight=weight, bias=bias), x, gradient, weights)
    add = partial(_add_convolution, weight=weight, bias=bias, shape=shape_of(function, rest))
    return Addition(add, x, gradient, weights)


def _each(value: Any, count: int) -> list[int]:
    """One number for each dimension, as ATen spreads a single one."""
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


__all__ = [
    "Addition",
    "AtOnce",
    "DeferWeights",
    "Queue",
    "convolution_backward",
    "left_for_later",
    "shape_of",
    "whole",
]
