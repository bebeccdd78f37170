"""Which sizes are the batch's: by the first tensor of a call, and by the symbols of a graph."""

from __future__ import annotations

from collections.abc import Sequence
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

    Further ones are of inputs as long in the example that are returned, sample by sample as far as sizes tell.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    first = next((node for node in inputs if _first_length(node) is not None), None)
    if first is None or isinstance(_first_size(first), int):
        return frozenset()
    alike = {_first_size(node) for node in inputs if _first_length(node) == _first_length(first)}
    returned = alike.intersection(map(_first_size, graph.output_node().all_input_nodes))
    kept = {size for size in returned if not isinstance(size, int) and _is_kept(graph, size)}
    return frozenset({_first_size(first), *kept})


def _is_kept(graph: fx.Graph, size: Any) -> bool:
    """Whether all that is made of what has this first size has it, too."""
    users = (user for node in graph.nodes if _first_size(node) == size for user in node.users)
    return all(user.op == "output" or _first_size(user) == size for user in users)


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
