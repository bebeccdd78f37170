"""The two ends of a stage's autograd graph.

    received leaves ──▶ Entrance ──▶ layers ──▶ Exit ──▶ what is sent
                            └───────── token ────┘

The token joins both ends, so that every received value gets a gradient, if only of zeros, whenever
any sent one does: the stage before waits for it. Where the loss may depend on some of the values
alone, marks cross beside them, whose gradient says for which: the stage before lets nothing flow
back from the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Entrance(torch.autograd.Function):
    """Lets layers write in place to what was received: a leaf of autograd may not be written to."""

    @staticmethod
    def forward(
        ctx: Any, flows: Sequence[bool], marked: bool, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        inside = tuple(leaf.data for leaf in leaves)
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
            came = [
                gradient is not None
                for flow, gradient in zip(ctx.flows, gradients[1:], strict=True)
                if flow
            ]
            result[-1] = torch.tensor(came, dtype=ctx.like[-1][1], device=ctx.like[-1][2])
        return (None, None, *result)


class _Exit(torch.autograd.Function):
    """Hands on what is sent as tensors of their own, each of which asks for a gradient where the
    token does.
    """

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
            for index, came in zip(ctx.marks, gradients[-1].tolist(), strict=True):
                back[index] = back[index] if came else None
        return (None, torch.zeros((), dtype=ctx.token[0], device=ctx.token[1]), *back)


def enter(
    leaves: Sequence[Tensor], flows: Sequence[bool], marked: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The token, and the received values for the layers to read.

    Args:
        leaves: as they were received, at least one.
        flows: for each whether a gradient flows back through it; the others get a gradient of
            zeros.
        marked: whether the last one is the marks: its gradient says for each that flows whether a
            gradient came.
    """
    token, *inside = _Entrance.apply(tuple(flows), marked, *leaves)  # type: ignore[no-untyped-call]
    return token, inside


def leave(token: Tensor, values: Sequence[Tensor], marks: Sequence[int] = ()) -> list[Tensor]:
    """What is sent, each asking for a gradient where anything that was received or trained does.

    Args:
        token: of the entrance.
        values: to send.
        marks: the positions of the values that the marks, which are the last of them, speak of;
            none without marks.
    """
    return list(_Exit.apply(tuple(marks), token, *values)) if values else []  # type: ignore[no-untyped-call]


__all__ = ["enter", "leave"]
