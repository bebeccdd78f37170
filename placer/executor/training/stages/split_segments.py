"""Compiled segments whose weight gradients stay a pass of their own, and the compiled loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.capture.weight_grads.compiled_layers import OpenedFunction, Product, with_openings
from placer.capture.weight_grads.deferred import GradientQueue
from placer.executor.engine.compiled_segments import (
    INDUCTOR,
    Backend,
    Border,
    CompiledSegment,
    known_to_compilers,
    own_code,
)
from placer.executor.segments import Segment

Loss = Callable[[list[Any], list[Any]], tuple[Tensor, dict[str, Any]]]

_OPTIONS: dict[str, dict[str, Any]] = {
    INDUCTOR: {"keep_output_stride": False, "bw_outputs_user_visible": False}
}
"""Operands of products, and gradients, stay in the layout that the compiler chose.

If that is channels last, the compiler would otherwise copy each of them back to the model's own
layout, and keep both."""


@dataclass
class OpenedSegment(CompiledSegment):
    """A segment as one compiled function, whose backward passes leave weight gradients for later.

    Attributes:
        function: ``function(reads, states, openings) -> (writes, given)``, the latter two by layer
            and product.
        as_written: the same, not compiled.
        products: by layer, the products whose weight gradients are left.
    """

    as_written: Callable[..., Any] = lambda *given: ()
    products: list[tuple[Product, ...]] = field(default_factory=list)
    _queue: GradientQueue | None = None
    _known: dict[Hashable, _AsWritten] = field(default_factory=dict)

    @classmethod
    def from_segment(cls, segment: Segment, border: Border, backend: Backend) -> OpenedSegment:
        """Compile a segment; see ``CompiledSegment``."""
        layers = [with_openings(step.layer, step.state) for step in segment.steps]
        own = own_code(_opened_function(segment, border, [run for run, _ in layers]))
        options = _OPTIONS.get(backend) if isinstance(backend, str) else None
        made = torch.compile(own, backend=backend, dynamic=False, options=options)
        return cls(
            segment.device, segment.steps, border, made, own, [products for _, products in layers]
        )

    @contextmanager
    def deferring(self, queue: GradientQueue) -> Iterator[None]:
        """Leave the weight gradients of ``products`` to the queue."""
        self._queue = queue
        try:
            yield
        finally:
            self._queue = None

    def _computed(self, reads: list[Any], states: list[list[Tensor]]) -> tuple[Any, ...]:
        assert self._queue is not None
        known = self._as_written(reads, states)
        # what comes from it requires a gradient
        anchor = torch.zeros((), requires_grad=True)
        left = [
            [_Left(self._queue, step.layer.name, product, state) for product in products]
            for step, products, state in zip(self.steps, self.products, states, strict=True)
        ]
        # A trick to get the gradient of an inner product's result out of a compiled function:
        #     result = product + opening        opening: zeros from _Opening, without memory
        #     gradient of result = gradient of opening ──▶ _Opening.backward ──▶ queue
        openings = [
            [_Opening.apply(anchor, zero, later) for zero, later in zip(*row, strict=True)]  # type: ignore[no-untyped-call]
            for row in zip(known.zeros, left, strict=True)
        ]
        writes: tuple[Any, ...]
        writes, given = self.function(reads, states, openings)
        for row, items in zip(left, given, strict=True):
            for later, x in zip(row, items, strict=True):
                later.x = x
        return tuple(itertools.starmap(_laid_out, zip(writes, known.layouts, strict=True)))

    @torch.no_grad()
    def _as_written(self, reads: Sequence[Any], states: Sequence[Sequence[Tensor]]) -> _AsWritten:
        # One run without compilation per shape: the shapes of products and the layouts of writes
        # depend on it.
        key = tuple(read.shape if isinstance(read, Tensor) else read for read in reads)
        if key not in self._known:
            copies = [
                [
                    tensor.clone() if name in step.layer.mutated else tensor
                    for name, tensor in zip(step.layer.state, state, strict=True)
                ]
                for step, state in zip(self.steps, states, strict=True)
            ]
            closed = [[None] * len(products) for products in self.products]
            with devices.keep_random_state([self.device]):
                writes, given = self.as_written(reads, copies, closed)
            zeros = [
                [
                    torch.zeros((), dtype=x.dtype, device=x.device).expand(product.shape(x, state))
                    for product, x in zip(products, items, strict=True)
                ]
                for products, items, state in zip(self.products, given, states, strict=True)
            ]
            self._known[key] = _AsWritten(zeros, [_layout_of(value) for value in writes])
        return self._known[key]


def compiled_loss(loss: Loss, backend: Backend) -> Loss:
    """Return a loss compiled; the compiler runs when it first runs.

    Args:
        loss: of the model's result and the target, both flattened.
        backend: of ``torch.compile``.
    """

    def run(values: list[Any], targets: list[Any]) -> tuple[Tensor, dict[str, Any]]:
        return loss(values, targets)

    made: Loss = torch.compile(own_code(run), backend=backend, dynamic=False)
    return made


@dataclass(frozen=True)
class _AsWritten:
    """What is known of a segment, for reads of one shape, from a run that is not compiled.

    Attributes:
        zeros: by layer, a zero as large as each product's result; they take no memory.
        layouts: of the values that it makes for others.
    """

    zeros: list[list[Tensor]]
    layouts: list[torch.memory_format | None]


def _layout_of(value: Any) -> torch.memory_format | None:
    """Return the memory format of a value; None if it has no name, or is not a tensor."""
    if not isinstance(value, Tensor):
        return None
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(
        value.dim(), torch.contiguous_format
    )
    return next(
        (one for one in (torch.contiguous_format, last) if value.is_contiguous(memory_format=one)),
        None,
    )


def _laid_out(value: Any, layout: torch.memory_format | None) -> Any:
    """Return a value in a memory format, in which copies to other devices are fast."""
    return value if layout is None else value.contiguous(memory_format=layout)


@dataclass
class _Left:
    """A product of a micro-batch whose weight gradient is left for later."""

    queue: GradientQueue
    layer: str
    product: Product
    state: Sequence[Tensor]
    x: Tensor | None = None

    def put(self, gradient: Tensor) -> None:
        """Put the weight gradient into the queue: the gradient of the product's result is there."""
        assert self.x is not None
        self.queue.put(
            replace(self.product.deferred_gradient(self.x, gradient, self.state), layer=self.layer)
        )


class _Opening(torch.autograd.Function):
    """Zeros that are added to a product's result, so that their gradient is the result's."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, zeros: Tensor, later: _Left) -> Tensor:
        ctx.later = later
        ctx.set_materialize_grads(False)
        return zeros

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        if gradients[0] is not None:
            ctx.later.put(gradients[0])
        return None, None, None


def _opened_function(
    segment: Segment, border: Border, layers: Sequence[OpenedFunction]
) -> Callable[[list[Any], list[list[Tensor]], list[list[Any]]], tuple[Any, list[Any]]]:
    device = known_to_compilers(segment.device)
    names = [(step.layer.reads, step.layer.writes) for step in segment.steps]

    def run(
        given: list[Any], states: list[list[Tensor]], openings: list[list[Any]]
    ) -> tuple[Any, list[Any]]:
        values: Mapping[str, Any] = dict(zip(border.reads, given))  # noqa: B905 - the compiler reads this
        kept = []
        for layer, (reads, writes), state, own in zip(layers, names, states, openings):  # noqa: B905
            made, items = layer(device, state, [values[name] for name in reads], own)
            values = {**values, **dict(zip(writes, made))}  # noqa: B905
            kept.append(items)
        return border.written(values), kept

    return run
