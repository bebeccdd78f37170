"""Where a dimension of what an operation is given lies in what it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

ROW = -1
"""In place of a dimension: one row of it was taken, by its number."""

SUMMED = -2
"""In place of a dimension: it was summed over, with one of another tensor."""

Place = int | None


def place_in(user: fx.Node, node: fx.Node, place: int) -> Place:
    """Where a dimension of a node lies in what one that uses it makes.

    Args:
        user: what uses it.
        node: what it uses.
        place: the dimension, or ``ROW``.

    Returns:
        The dimension, ``ROW`` or ``SUMMED``; None where that is not known.
    """
    if user.op != "call_function" or place == SUMMED:
        return None
    if node.target is torch.ops.aten.unbind.int:
        return ROW  # one of its results
    known = _BY_TARGET.get(user.target)
    if place == ROW:
        return ROW if known is _lined_up or is_pointwise(user) else None
    if known is not None:
        return known(user, node, place)
    return _lined_up(user, node, place) if is_pointwise(user) else None


def is_pointwise(node: fx.Node) -> bool:
    """Whether each number of what it makes is made of those that lie there in what it is given."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _lined_up(user: fx.Node, node: fx.Node, place: int) -> Place:
    """The last dimensions are those of what it is given."""
    rank = _rank(user)
    return place + rank - _rank(node) if rank else None


def _attention(user: fx.Node, node: fx.Node, place: int) -> Place:
    # the mask
    return None if node in user.args[:3] else _lined_up(user, node, place)


def _unsqueezed(user: fx.Node, node: fx.Node, place: int) -> Place:
    return place + int(_argument(user, 1, 0) % _rank(user) <= place)


def _selected(user: fx.Node, node: fx.Node, place: int) -> Place:
    dim = int(_argument(user, 1, 0)) % _rank(node)
    if dim == place:
        return ROW if place == 0 and isinstance(_argument(user, 2, None), int) else None
    return place - (dim < place)


def _sliced(user: fx.Node, node: fx.Node, place: int) -> Place:
    return place if _argument(user, 1, 0) % _rank(node) != place else None


def _unbound(user: fx.Node, node: fx.Node, place: int) -> Place:
    return 0 if place == 0 and _argument(user, 1, 0) == 0 else None


def _looked_up(user: fx.Node, node: fx.Node, place: int) -> Place:
    """The rows of a table, in the shape of their numbers."""
    return place if user.args[1] is node and user.args[0] is not node else None


def _product(user: fx.Node, node: fx.Node, place: int) -> Place:
    """Of matrices: the last dimension of the first one and the last but one of the second are
    summed over.
    """
    first, second = user.args[:2]
    rank = _rank(node)
    if first is second or node not in (first, second):
        return None
    summed = rank - 1 if node is first else max(0, rank - 2)
    if place == summed:
        return SUMMED
    if node is first and _rank(second) == 1:
        return place
    return _lined_up(user, node, place) if node is first or rank > 1 else None


def _linear(user: fx.Node, node: fx.Node, place: int) -> Place:
    """By a weight of rows for the results, each as long as what goes in."""
    if user.args.count(node) != 1:
        return None
    if node is user.args[0]:
        return place if place < _rank(node) - 1 else SUMMED
    if node is user.args[1]:
        return _rank(user) - 1 if place == 0 else SUMMED
    return _rank(user) - 1


def _outer(user: fx.Node, node: fx.Node, place: int) -> Place:
    return user.args.index(node) if user.args.count(node) == 1 else None


def _einsum(user: fx.Node, node: fx.Node, place: int) -> Place:
    """By the letters of the equation."""
    equation, operands = user.args[:2]
    inputs, arrow, result = str(equation).replace(" ", "").partition("->")
    assert isinstance(operands, (list, tuple))
    if not arrow or "." in inputs or operands.count(node) != 1:
        return None
    letter = inputs.split(",")[operands.index(node)][place]
    return result.index(letter) if letter in result else SUMMED


_aten = torch.ops.aten
_BY_TARGET: dict[Any, Callable[[fx.Node, fx.Node, int], Place]] = {
    **dict.fromkeys(
        (_aten.expand.default, _aten.clone.default, _aten.detach.default, _aten.alias.default),
        _lined_up,
    ),
    **dict.fromkeys(
        (_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device, _aten._to_copy.default), _lined_up
    ),
    _aten.scaled_dot_product_attention.default: _attention,
    _aten.unsqueeze.default: _unsqueezed,
    _aten.select.int: _selected,
    _aten.unbind.int: _unbound,
    _aten.slice.Tensor: _sliced,
    _aten.embedding.default: _looked_up,
    **dict.fromkeys((_aten.matmul.default, _aten.mm.default, _aten.bmm.default), _product),
    _aten.linear.default: _linear,
    _aten.outer.default: _outer,
    _aten.einsum.default: _einsum,
}
"""Beside operations on each number, whose last dimensions are those of what they are given."""


def _argument(node: fx.Node, place: int, default: Any) -> Any:
    return node.args[place] if place < len(node.args) else default


def _rank(node: Any) -> int:
    return len(shape(node))


def shape(node: Any) -> Sequence[Any]:
    """The sizes of what a node makes; none of what is no tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.shape if isinstance(value, Tensor) else ()
