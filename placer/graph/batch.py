"""Which sizes are the batch's: by the first tensor of a call, and by the symbols of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx


def batch_size(tensors: Sequence[Any]) -> int:
    """The first dimension of the first tensor that has one; 1 where none has."""
    return next((int(tensor.shape[0]) for tensor in tensors if isinstance(tensor, Tensor) and tensor.dim()), 1)


def is_batched(tensor: Any, batch: int) -> bool:
    """Whether a tensor may be a part of a batch of so many samples, as far as its size tells."""
    return batch > 1 and isinstance(tensor, Tensor) and tensor.dim() > 0 and tensor.shape[0] == batch


def batch_symbols(graph: fx.Graph) -> frozenset[Any]:
    """The symbols of the batch's size: that of the same input as ``batch_size``; none where it is fixed.

    Further ones are of inputs as long in the example that nothing tells to be another size: a graph ties sizes by the
    operations that ask for it, and a padding mask whose rows are picked by their numbers is tied to nothing.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    first = next((node for node in inputs if _first_length(node) is not None), None)
    if first is None or isinstance(_first_size(first), int):
        return frozenset()
    alike = {_first_size(node) for node in inputs if _first_length(node) == _first_length(first)}
    others = {size for size in alike if isinstance(size, int)} | _inner_sizes(inputs) | _sizes_of_tables(graph)
    return frozenset({_first_size(first), *(alike - others)})


def beside_batch(graph: fx.Graph) -> frozenset[int]:
    """The inputs whose first dimension is as long as the batch was in the example, and is another.

    That of a mask is, which is added to a square of another size, and that of a table in which is looked up. None are
    known where the batch's size is fixed.
    """
    symbols = batch_symbols(graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    lengths = {_first_length(node) for node in inputs if _first_size(node) in symbols}
    return frozenset(
        place
        for place, node in enumerate(inputs)
        if _first_length(node) in lengths and _first_size(node) not in symbols
    )


def _inner_sizes(inputs: Iterable[fx.Node]) -> set[Any]:
    """The symbols of other dimensions than the first of inputs: of the length of a sequence, say."""
    sizes = (size for node in inputs for size in _shape(node)[1:])
    return {size.node.expr for size in sizes if isinstance(size, torch.SymInt)}


def _sizes_of_tables(graph: fx.Graph) -> set[Any]:
    """The first sizes of all in which numbers of the data look up rows; those of a range, which are all, do not."""
    return {
        _first_size(node.args[0])
        for node in graph.nodes
        if node.op == "call_function" and node.target in _LOOKS_UP and _is_data(_LOOKS_UP[node.target](*node.args))
    }


_LOOKS_UP: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.embedding.default: lambda table, rows, *rest: rows,
    torch.ops.aten.index_select.default: lambda table, dimension, rows: rows if dimension == 0 else None,
    torch.ops.aten.index.Tensor: lambda table, rows: rows[0],
}
"""What says which rows are looked up, of the operations that look up rows of what they are given first."""


def _is_data(rows: Any) -> bool:
    """Whether these are numbers that come from an input's values, not from sizes alone."""
    if not isinstance(rows, fx.Node) or not _holds_numbers(rows) or rows.meta["val"].dtype == torch.bool:
        return False  # truth values pick sample by sample
    seen, left = {rows}, [rows]
    while left:
        node = left.pop()
        if node.op == "placeholder":
            return True
        behind = [other for other in node.all_input_nodes if other not in seen and _holds_numbers(other)]
        seen.update(behind)
        left += behind
    return False


def _holds_numbers(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _shape(node: fx.Node) -> Sequence[Any]:
    value = node.meta.get("val")
    return value.shape if isinstance(value, Tensor) else ()


def _first_length(node: fx.Node) -> int | None:
    """The length of the first dimension in the example; None where there is none. To compare a symbol would bind it."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.dim():
        return None
    size = value.shape[0]
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _first_size(node: fx.Node) -> Any:
    """The same as the graph has it: a number or an expression."""
    length = _first_length(node)
    if length is None:
        return None
    size = node.meta["val"].shape[0]
    return size.node.expr if isinstance(size, torch.SymInt) and not size.node.expr.is_number else length
