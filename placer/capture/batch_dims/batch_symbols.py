"""Which sizes of a captured graph are the batch's: by the inputs' batch dimensions, and by the
symbols of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from placer.capture.batch_dims.dim_propagation import place_in, shape

Dims = Sequence[int | None]
"""Of each input the batch dimension; None where it has none."""


def batch_symbols(graph: fx.Graph, dims: Dims) -> frozenset[Any]:
    """Return the symbols of the batch's size; none if the graph holds for one size alone.

    There is more than one where nothing ties inputs to one another: a padding mask whose rows are
    picked by their numbers has a size of its own.
    """
    first, alike = _batched(graph, dims)
    if first is None:
        return frozenset()
    sizes = {size for node, dim, size in alike if not _is_beside(node, dim, first, graph, dims)}
    return frozenset({first, *(size for size in sizes if not isinstance(size, int))})


def beside_batch(graph: fx.Graph, dims: Dims) -> frozenset[int]:
    """Return the positions of inputs whose batch dimension is another dimension's size, though as
    long in the example.

    That of a mask is, which is added to a square of another size, and that of a table in which is
    looked up. None are known if the batch's size is fixed. That an input's size is fixed tells
    nothing: a model may go by its number.
    """
    first, alike = _batched(graph, dims)
    if first is None:
        return frozenset()
    inputs = _inputs(graph)
    return frozenset(
        inputs.index(node) for node, dim, _ in alike if _is_beside(node, dim, first, graph, dims)
    )


def _inputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _batched(graph: fx.Graph, dims: Dims) -> tuple[Any, list[tuple[fx.Node, int, Any]]]:
    """Return the symbol of the batch's size, None if that is fixed; and the inputs that have it, by
    their dimension.
    """
    each = [
        (node, dim, _size(node, dim))
        for node, dim in zip(_inputs(graph), dims, strict=True)
        if dim is not None
    ]
    return (None, []) if not each or isinstance(each[0][2], int) else (each[0][2], each)


def _size(node: fx.Node, dim: int) -> Any:
    """Return a size as the graph has it: a number or an expression. To compare a symbol would bind
    it.
    """
    size = node.meta["val"].shape[dim]
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.hint) if size.node.expr.is_number else size.node.expr


def _is_beside(node: fx.Node, dim: int, batch: Any, graph: fx.Graph, dims: Dims) -> bool:
    """Return whether a size is another dimension's, or its rows are looked up by values, or some by
    their number.
    """
    size = _size(node, dim)
    if size == batch:
        return False
    for other, batch_dim in zip(_inputs(graph), dims, strict=True):
        lengths = [length for place, length in enumerate(shape(other)) if place != batch_dim]
        if any(isinstance(length, torch.SymInt) and length.node.expr == size for length in lengths):
            return True
    # where the dimension lies in what is made of it
    seen, left = {node}, [(node, dim)]
    while left:
        at, place = left.pop()
        for user in at.users:
            if (
                place == 0
                and user.args
                and user.args[0] is at
                and (_looks_up(user) or _takes_some(user))
            ):
                return True
            behind = place_in(user, at, place)
            if behind is None or user in seen:
                continue
            if any(
                other != behind and _size(user, other) == batch for other in range(len(shape(user)))
            ):
                return True
            seen.add(user)
            left.append((user, behind))
    return False


def _looks_up(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and node.target in _LOOKS_UP
        and _is_data(_LOOKS_UP[node.target](*node.args))
    )


def _takes_some(node: fx.Node) -> bool:
    """Whether it is some of the first rows, by their number."""
    if node.target is not torch.ops.aten.slice.Tensor or len(node.args) < 4 or node.args[1] != 0:
        return False
    end = node.args[3]
    return isinstance(end, int) and end < 2**62


_LOOKS_UP: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.embedding.default: lambda table, rows, *rest: rows,
    torch.ops.aten.index_select.default: lambda table, dimension, rows: (
        rows if dimension == 0 else None
    ),
    torch.ops.aten.index.Tensor: lambda table, rows: rows[0],
}
"""What says which rows are looked up, of the operations that look up rows of what they are given
first."""


def _is_data(rows: Any) -> bool:
    """Whether these are numbers that come from an input's values, not from sizes alone."""
    if (
        not isinstance(rows, fx.Node)
        or not _holds_numbers(rows)
        or rows.meta["val"].dtype == torch.bool
    ):
        return False  # truth values pick sample by sample
    seen, left = {rows}, [rows]
    while left:
        node = left.pop()
        if node.op == "placeholder":
            return True
        behind = [
            other for other in node.all_input_nodes if other not in seen and _holds_numbers(other)
        ]
        seen.update(behind)
        left += behind
    return False


def _holds_numbers(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)
