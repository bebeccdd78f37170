"""Detection of the batch size among the sizes of a captured graph.

The inputs' batch dimensions and the graph's symbols decide:

    x    (s0, 128)   batch dimension 0, so s0 is the batch size
    y    (s0,)       batch dimension 0 with the same symbol
    mask (s1, s1)    dimension 0 has s0's value in the example only: not the batch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from placer.capture.batch_dims.dim_propagation import output_dim, shape

Dims = Sequence[int | None]
"""The batch dimension of each input; None without one."""


def batch_symbols(graph: fx.Graph, dims: Dims) -> frozenset[Any]:
    """Return the symbols of the batch size; an empty set if the graph has a fixed batch size.

    There are several if nothing ties inputs to one another. For example, a padding mask whose rows
    are selected by index has a size of its own.

    Args:
        graph: a captured graph.
        dims: the batch dimension of each input.
    """
    first, alike = _batched(graph, dims)
    if first is None:
        return frozenset()
    sizes = {
        size for node, dim, size in alike if not _is_other_length(node, dim, first, graph, dims)
    }
    return frozenset({first, *(size for size in sizes if not isinstance(size, int))})


def inputs_of_other_lengths(graph: fx.Graph, dims: Dims) -> frozenset[int]:
    """Return the positions of inputs that have the batch's length only by coincidence.

    Examples are a mask that is added to a square of another size, and a table for lookups. The set
    is empty if the batch size is fixed. A fixed size of a single input proves nothing: a model may
    depend on its value.

    Args:
        graph: a captured graph.
        dims: the batch dimension of each input.
    """
    first, alike = _batched(graph, dims)
    if first is None:
        return frozenset()
    inputs = _inputs(graph)
    return frozenset(
        inputs.index(node)
        for node, dim, _ in alike
        if _is_other_length(node, dim, first, graph, dims)
    )


def _inputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _batched(graph: fx.Graph, dims: Dims) -> tuple[Any, list[tuple[fx.Node, int, Any]]]:
    """Return the symbol of the batch size, and (input, batch dimension, size) of each input.

    The symbol is None if the size is fixed.
    """
    each = [
        (node, dim, _size(node, dim))
        for node, dim in zip(_inputs(graph), dims, strict=True)
        if dim is not None
    ]
    return (None, []) if not each or isinstance(each[0][2], int) else (each[0][2], each)


def _size(node: fx.Node, dim: int) -> Any:
    """Return a size as a number or an expression.

    To compare the symbol itself would specialise the graph to its value.
    """
    size = node.meta["val"].shape[dim]
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.hint) if size.node.expr.is_number else size.node.expr


def _is_other_length(node: fx.Node, dim: int, batch: Any, graph: fx.Graph, dims: Dims) -> bool:
    """Return whether an input's batch dimension is not the batch.

    Its size belongs to another dimension, or its rows are looked up by values, or only the first
    rows are taken.
    """
    size = _size(node, dim)
    if size == batch:
        return False
    return _is_another_dimension(size, graph, dims) or _is_used_apart(node, dim, batch)


def _is_another_dimension(size: Any, graph: fx.Graph, dims: Dims) -> bool:
    """Return whether a dimension of an input that is not its batch dimension has this size."""
    for other, batch_dim in zip(_inputs(graph), dims, strict=True):
        lengths = [length for place, length in enumerate(shape(other)) if place != batch_dim]
        if any(isinstance(length, torch.SymInt) and length.node.expr == size for length in lengths):
            return True
    return False


def _is_used_apart(node: fx.Node, dim: int, batch: Any) -> bool:
    """Return whether the operations that use a dimension show that it is not the batch.

    They look up rows of it, take its first rows, or combine it with the batch in one result.
    """
    seen, left = {node}, [(node, dim)]
    while left:
        at, place = left.pop()
        for user in at.users:
            if (
                place == 0
                and user.args
                and user.args[0] is at
                and (_looks_up_rows(user) or _takes_first_rows(user))
            ):
                return True
            behind = output_dim(user, at, place)
            if behind is None or user in seen:
                continue
            # Two dimensions of one result cannot both be the batch.
            if any(
                other != behind and _size(user, other) == batch for other in range(len(shape(user)))
            ):
                return True
            seen.add(user)
            left.append((user, behind))
    return False


def _looks_up_rows(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and node.target in _LOOKUP_ROWS
        and _come_from_values(_LOOKUP_ROWS[node.target](*node.args))
    )


def _takes_first_rows(node: fx.Node) -> bool:
    """Return whether a node is a slice of the first rows with a constant end."""
    if node.target is not torch.ops.aten.slice.Tensor or len(node.args) < 4 or node.args[1] != 0:
        return False
    end = node.args[3]
    return isinstance(end, int) and end < 2**62


_LOOKUP_ROWS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.embedding.default: lambda table, rows, *rest: rows,
    torch.ops.aten.index_select.default: lambda table, dimension, rows: (
        rows if dimension == 0 else None
    ),
    torch.ops.aten.index.Tensor: lambda table, rows: rows[0],
}
"""Operations that look up rows of their first argument, and how to get the row numbers."""


def _come_from_values(rows: Any) -> bool:
    """Return whether row numbers come from an input's values and not only from sizes."""
    if (
        not isinstance(rows, fx.Node)
        or not _is_tensor(rows)
        or rows.meta["val"].dtype == torch.bool
    ):
        # Booleans select sample by sample.
        return False
    seen, left = {rows}, [rows]
    while left:
        node = left.pop()
        if node.op == "placeholder":
            return True
        behind = [
            other for other in node.all_input_nodes if other not in seen and _is_tensor(other)
        ]
        seen.update(behind)
        left += behind
    return False


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)
