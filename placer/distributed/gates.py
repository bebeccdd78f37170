"""The two ends of a stage's autograd graph.

    received leaves ──▶ Entrance ──▶ layers ──▶ Exit ──▶ what is sent
                            └───────── token ────┘

The token joins both ends, so that every received value gets a gradient, if only of zeros, whenever any sent one does:
the stage before waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Entrance(torch.autograd.Function):
    """Lets layers write in place to what was received: a leaf of autograd may not be written to."""

    @staticmethod
    def forward(ctx: Any, flows: Sequence[bool], *leaves: Tensor) -> tuple[Tensor, ...]:
        inside = tuple(leaf.data for leaf in leaves)
        ctx.flows, ctx.like = flows, [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
        ctx.mark_non_differentiable(*(value for value, flow in zip(inside, flows, strict=True) if not flow))
        return (leaves[0].new_zeros(()), *inside)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        result = [
            gradient.contiguous()
            if flow and gradient is not None
            else torch.zeros(like[0], dtype=like[1], device=like[2])
            for flow, gradient, like in zip(ctx.flows, gradients[1:], ctx.like, strict=True)
        ]
        return (None, *result)


class _Exit(torch.autograd.Function):
    """Hands on what is sent as tensors of their own, each of which asks for a gradient where the token does."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.token = (token.dtype, token.device)
        return tuple(value.data for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros((), dtype=ctx.token[0], device=ctx.token[1]), *gradients)


def enter(leaves: Sequence[Tensor], flows: Sequence[bool]) -> tuple[Tensor, list[Tensor]]:
    """The token, and the received values for the layers to read.

    Args:
        leaves: as they were received, at least one.
        flows: for each whether a gradient flows back through it; the others get a gradient of zeros.
    """
    token, *inside = _Entrance.apply(tuple(flows), *leaves)  # type: ignore[no-untyped-call]
    return token, inside


def leave(token: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """What is sent, each asking for a gradient where anything that was received or trained does."""
    return list(_Exit.apply(token, *values)) if values else []  # type: ignore[no-untyped-call]


__all__ = ["enter", "leave"]
