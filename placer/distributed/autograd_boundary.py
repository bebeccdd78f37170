"""The entrance and the exit of a stage's autograd graph.

    received leaves ──▶ Entrance ──▶ layers ──▶ Exit ──▶ sent values
                            └───────── token ────┘

The token connects both ends. Every received value thus gets a gradient, of zeros if necessary,
whenever a sent value does, because the previous stage waits for it. If the loss may depend on only
some of the values, marks are sent along with them. The gradient of the marks states which values
received a gradient; the previous stage blocks the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Entrance(torch.autograd.Function):
    """An identity that lets layers write to received values in place.

    Autograd forbids in-place writes to leaves.
    """

    @staticmethod
    def forward(
        ctx: Any, flows: Sequence[bool], marked: bool, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        # new tensors with their own version counters, which layers may write to
        inside = tuple(leaf.data for leaf in leaves)
        # keep None, to distinguish absent gradients from zeros
        ctx.set_materialize_grads(False)
        ctx.flows, ctx.marked = flows, marked
        ctx.like = [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
        ctx.mark_non_differentiable(
            *(value for value, flow in zip(inside, flows, strict=True) if not flow)
        )
        return (leaves[0].new_zeros(()), *inside)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        result = [
            gradient.contiguous()
            if flow and gradient is not None
            else torch.zeros(like[0], dtype=like[1], device=like[2])
            for flow, gradient, like in zip(ctx.flows, gradients[1:], ctx.like, strict=True)
        ]
        if ctx.marked:
            arrived = [
                gradient is not None
                for flow, gradient in zip(ctx.flows, gradients[1:], strict=True)
                if flow
            ]
            result[-1] = torch.tensor(arrived, dtype=ctx.like[-1][1], device=ctx.like[-1][2])
        return (None, None, *result)


class _Exit(torch.autograd.Function):
    """An identity whose outputs require a gradient whenever the token does."""

    @staticmethod
    def forward(
        ctx: Any, marks: Sequence[int], token: Tensor, *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.marks, ctx.token = marks, (token.dtype, token.device)
        return tuple(value.data for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back: list[Tensor | None] = list(gradients)
        if ctx.marks:
            # synchronises with the device, once per micro-batch
            for index, arrived in zip(ctx.marks, gradients[-1].tolist(), strict=True):
                back[index] = back[index] if arrived else None
        return (None, torch.zeros((), dtype=ctx.token[0], device=ctx.token[1]), *back)


def enter(
    leaves: Sequence[Tensor], flows: Sequence[bool], marked: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Return the token, and the received values for the layers to read.

    Args:
        leaves: the received tensors, at least one.
        flows: for each, whether a gradient flows back through it; others get zeros.
        marked: whether the last leaf is the marks: its gradient states for each flowing leaf
            whether a gradient came.
    """
    token, *inside = _Entrance.apply(tuple(flows), marked, *leaves)  # type: ignore[no-untyped-call]
    return token, inside


def leave(token: Tensor, values: Sequence[Tensor], marks: Sequence[int] = ()) -> list[Tensor]:
    """Return the tensors to send, which require a gradient if any received or trained tensor does.

    Args:
        token: from ``enter``.
        values: to send.
        marks: the positions of the values that the marks, the last value, describe; empty without
            marks.
    """
    return (
        list(_Exit.apply(tuple(marks), token, *values))  # type: ignore[no-untyped-call]
        if values
        else []
    )


__all__ = ["enter", "leave"]
