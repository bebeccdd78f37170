"""Propagation of a dimension through operations: the output dimension that an input one becomes.

    x (batch, 3, 8)  ── permute, unknown ──▶  None
                     ── unsqueeze(0) ───────▶  dimension 1 of (1, batch, 3, 8)
                     ── x[0] ───────────────▶  SELECTED: one sample was taken
                     ── weight @ x ─────────▶  SUMMED, if the batch was the inner dimension

Callers stop following a dimension where the result is None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

SELECTED = -1
"""Instead of a dimension: a single index of it was selected."""

SUMMED = -2
"""Instead of a dimension: a product summed over it."""

OutputDim = int | None


def output_dim(user: fx.Node, node: fx.Node, dim: int) -> OutputDim:
    """Map an input dimension to the output dimension that it becomes.

    Args:
        user: the operation.
        node: its input.
        dim: the dimension of ``node``, or ``SELECTED``.

    Returns:
        The dimension, ``SELECTED`` or ``SUMMED``; None if it is unknown.
    """
    if user.op != "call_function" or dim == SUMMED:
        return None
    if node.target is torch.ops.aten.unbind.int:
        return SELECTED  # one of its results
    known = _BY_TARGET.get(user.target)
    if dim == SELECTED:
        return SELECTED if known is _broadcast_dim or is_pointwise(user) else None
    if known is not None:
        return known(user, node, dim)
    return _broadcast_dim(user, node, dim) if is_pointwise(user) else None


def is_pointwise(node: fx.Node) -> bool:
    """Return whether each element of the result depends only on the elements at its position."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _broadcast_dim(user: fx.Node, node: fx.Node, dim: int) -> OutputDim:
    """Map by broadcasting rules: shapes are aligned at their last dimensions."""
    rank = _rank(user)
    return dim + rank - _rank(node) if rank else None


def _attention_dim(user: fx.Node, node: fx.Node, dim: int) -> OutputDim:
    # Query, key and value are not followed; the mask, the fourth argument, broadcasts.
    return None if node in user.args[:3] else _broadcast_dim(user, node, dim)


def _unsqueeze_dim(user: fx.Node, node: fx.Node, dim: int) -> OutputDim:
    return dim + int(_argument(user, 1, 0) % _rank(user) <= dim)


def _select_dim(user: fx.Node, node: fx.Node, dim: int) -> OutputDim:
    selected = int(_argument(user, 1, 0)) % _rank(node)
    if selected == dim:
        return SELECTED if dim == 0 and isinstance(_argument(user, 2, None), int) else None
    return dim - (selected < dim)


def _slice_dim(user: fx.Node, node: fx.Node, dim: int) -> OutputDim:
    return dim if _argument(user, 1, 0) % _rank(node) != dim else None


def _unbind_dim(user: fx.Node, node: fx.Node, dim: int) -> OutputDim:
    return 0 if dim == 0 and _argument(user, 1, 0) == 0 else None


def _embedding_dim(user: fx.Node, node: fx.Node, dim: int) -> OutputDim:
    """Map dimensions of row numbers; the result has their shape and the row's."""
    return dim if user.args[1] is node and user.args[0] is not node else None


def _matmul_dim(user: fx.Node, node: fx.Node, dim: int) -> OutputDim:
    """Map dimensions of a matrix product.

    It sums over the last dimension of the first argument and the last but one of the second.
    """
    first, second = user.args[:2]
    rank = _rank(node)
    if first is second or node not in (first, second):
        return None
    summed = rank - 1 if node is first else max(0, rank - 2)
    if dim == summed:
        return SUMMED
    if node is first and _rank(second) == 1:
        return dim
    return _broadcast_dim(user, node, dim) if node is first or rank > 1 else None


def _linear_dim(user: fx.Node, node: fx.Node, dim: int) -> OutputDim:
    """Map dimensions of a linear layer, whose weight has the shape (out, in)."""
    if user.args.count(node) != 1:
        return None
    if node is user.args[0]:
        return dim if dim < _rank(node) - 1 else SUMMED
    if node is user.args[1]:
        return _rank(user) - 1 if dim == 0 else SUMMED
    return _rank(user) - 1


def _outer_dim(user: fx.Node, node: fx.Node, dim: int) -> OutputDim:
    return user.args.index(node) if user.args.count(node) == 1 else None


def _einsum_dim(user: fx.Node, node: fx.Node, dim: int) -> OutputDim:
    """Map dimensions by the letters of the equation."""
    equation, operands = user.args[:2]
    inputs, arrow, result = str(equation).replace(" ", "").partition("->")
    assert isinstance(operands, (list, tuple))
    if not arrow or "." in inputs or operands.count(node) != 1:
        return None
    letter = inputs.split(",")[operands.index(node)][dim]
    return result.index(letter) if letter in result else SUMMED


_aten = torch.ops.aten
_BY_TARGET: dict[Any, Callable[[fx.Node, fx.Node, int], OutputDim]] = {
    **dict.fromkeys(
        (_aten.expand.default, _aten.clone.default, _aten.detach.default, _aten.alias.default),
        _broadcast_dim,
    ),
    **dict.fromkeys(
        (_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device, _aten._to_copy.default),
        _broadcast_dim,
    ),
    _aten.scaled_dot_product_attention.default: _attention_dim,
    _aten.unsqueeze.default: _unsqueeze_dim,
    _aten.select.int: _select_dim,
    _aten.unbind.int: _unbind_dim,
    _aten.slice.Tensor: _slice_dim,
    _aten.embedding.default: _embedding_dim,
    **dict.fromkeys((_aten.matmul.default, _aten.mm.default, _aten.bmm.default), _matmul_dim),
    _aten.linear.default: _linear_dim,
    _aten.outer.default: _outer_dim,
    _aten.einsum.default: _einsum_dim,
}
"""Operations that are not pointwise, and how they map dimensions."""


def _argument(node: fx.Node, index: int, default: Any) -> Any:
    return node.args[index] if index < len(node.args) else default


def _rank(node: Any) -> int:
    return len(shape(node))


def shape(node: Any) -> Sequence[Any]:
    """Return the sizes of a node's result; () if it is not a tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.shape if isinstance(value, Tensor) else ()
