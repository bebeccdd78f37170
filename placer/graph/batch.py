"""Which sizes are the batch's: by the first tensor of a call, and by the symbols of a graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from placer.graph.lying import is_pointwise, place_in, shape


def batch_size(tensors: Sequence[Any]) -> int:
    """The first dimension of the first tensor that has one; 1 where none has."""
    return next((int(tensor.shape[0]) for tensor in tensors if isinstance(tensor, Tensor) and tensor.dim()), 1)


def is_batched(tensor: Any, batch: int) -> bool:
    """Whether a tensor may be a part of a batch of so many samples, as far as its size tells."""
    return batch > 1 and isinstance(tensor, Tensor) and tensor.dim() > 0 and tensor.shape[0] == batch


def batch_symbols(graph: fx.Graph) -> frozenset[Any]:
    """The symbols of the batch's size: that of the same input as ``batch_size``; none where it is fixed.

    Further ones are of inputs as long in the example that nothing tells to be another size: a padding mask whose rows
    are picked by their numbers is tied to nothing.
    """
    first, alike = _alike(graph)
    if first is None:
        return frozenset()
    sizes = {_first_size(node) for node in alike if not _is_beside(node, first, _inputs(graph))}
    return frozenset({first, *(size for size in sizes if not isinstance(size, int))})


def beside_batch(graph: fx.Graph) -> frozenset[int]:
    """The inputs whose first dimension is as long as the batch was in the example, and is another.

    That of a mask is, which is added to a square of another size, and that of a table in which is looked up. None are
    known where the batch's size is fixed. That an input's size is fixed tells nothing: a model may go by its number.
    """
    first, alike = _alike(graph)
    inputs = _inputs(graph)
    return frozenset(place for place, node in enumerate(inputs) if node in alike and _is_beside(node, first, inputs))


def made_of_no_input(graph: fx.Graph) -> frozenset[str]:
    """The names of what is made of no input, and by no input's size: constants, unless drawn or written to."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("get_attr", "call_function") and found.issuperset(node.all_input_nodes):
            found.add(node)
    return frozenset(node.name for node in found)


def amounts(graph: fx.Graph, symbols: frozenset[Any]) -> dict[str, bool]:
    """The numbers that follow from the batch's size, by name: whether those of its parts add up to that of the whole.

    So does ``x.shape[0]``, ``x.numel()`` or ``x.shape[0] / 2``, and not ``x.shape[0] + 1``.
    """
    found: dict[str, bool] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat)) and value.node.expr.free_symbols & symbols:
            found[node.name] = _adds_up(value.node.expr, symbols)
    return found


def results(graph: fx.Graph) -> list[fx.Node]:
    """What a graph returns, in order; a number that was fixed is none of its nodes."""
    (output,) = graph.find_nodes(op="output")
    returned: Any = output.args[0]
    return [node for node in returned if isinstance(node, fx.Node)]


def sample_dims(graph: fx.Graph, symbols: frozenset[Any]) -> dict[str, int | None]:
    """By the name of a result that grows with the batch, which dimension the samples are; None where no single one is.

    None is so for the similarities of every sample to every other one: rows of parts do not have the whole's length.
    """
    found: dict[str, int | None] = {}
    for node in results(graph):
        dims = [dim for dim, size in enumerate(shape(node)) if grows(size, symbols)]
        if len(dims) > 1:
            found[node.name] = None
        elif dims and (_size(node, dims[0]) in symbols or (dims == [0] and _in_turn(node, symbols))):
            found[node.name] = dims[0]
    return found


def _size(node: fx.Node, dim: int) -> Any:
    return node.meta["val"].shape[dim].node.expr


def _in_turn(node: fx.Node, symbols: frozenset[Any]) -> bool:
    """Whether the rows of a tensor are several of each sample, one sample after another.

    Such are the tokens of all sequences, which a router of experts has as one list.
    """
    seen, left = {node}, [node]
    while left:
        at = left.pop()
        if _size(at, 0) in symbols:
            continue
        if at.target in _RESHAPED:
            sources = at.all_input_nodes[:1]
        elif _is_row_by_row(at):
            sources = [one for one in at.all_input_nodes if any(grows(size, symbols) for size in shape(one))]
        else:
            sources = []
        if not sources or not all(shape(one) and grows(shape(one)[0], symbols) for one in sources):
            return False
        left += [one for one in sources if one not in seen]
        seen.update(sources)
    return True


def _is_row_by_row(node: fx.Node) -> bool:
    """Whether each row of what it makes is made of that row of what it is given."""
    if node.target in _ALONG_ONE:
        return isinstance(node.args[1], int) and node.args[1] % len(shape(node)) > 0
    return node.target in _ROW_BY_ROW or is_pointwise(node)


_RESHAPED = {
    *(torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default),
    *(torch.ops.aten.flatten.using_ints, torch.ops.aten.unflatten.int),
}
_ROW_BY_ROW = {
    *(torch.ops.aten.linear.default, torch.ops.aten.layer_norm.default, torch.ops.aten.clone.default),
    *(torch.ops.aten.to.dtype, torch.ops.aten.to.dtype_layout, torch.ops.aten._to_copy.default),
    *(torch.ops.aten.contiguous.default, torch.ops.aten.dropout.default, torch.ops.aten.detach.default),
}
"""Beside operations on each number, and those that go along one dimension."""

_ALONG_ONE = {torch.ops.aten.softmax.int, torch.ops.aten.log_softmax.int}


def grows(size: Any, symbols: frozenset[Any]) -> bool:
    """Whether a size follows from that of the batch, whichever of its symbols has it: their quotient does not."""
    if not isinstance(size, torch.SymInt):
        return False
    expression = size.node.expr
    here = expression.free_symbols & symbols
    return bool(here) and (
        expression in symbols or expression.subs(dict.fromkeys(here, 7)) != expression.subs(dict.fromkeys(here, 11))
    )


def _adds_up(expression: Any, symbols: frozenset[Any]) -> bool:
    """Whether f(a + b) = f(a) + f(b) for sizes of the batch, the others being any: even, odd and prime ones tell."""
    others = {symbol: 2 * place + 5 for place, symbol in enumerate(sorted(expression.free_symbols - symbols, key=str))}

    def at(size: int) -> float:
        return float(expression.subs(others | dict.fromkeys(symbols, size)))

    return all(math.isclose(at(a + b), at(a) + at(b)) for a, b in ((2, 3), (7, 11), (64, 64), (17, 8)))


def _inputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _alike(graph: fx.Graph) -> tuple[Any, list[fx.Node]]:
    """The symbol of the batch's size, None where it is fixed; and the inputs that were as long in the example."""
    inputs = _inputs(graph)
    first = next((node for node in inputs if _first_length(node) is not None), None)
    if first is None or isinstance(_first_size(first), int):
        return None, []
    return _first_size(first), [node for node in inputs if _first_length(node) == _first_length(first)]


def _is_beside(node: fx.Node, batch: Any, inputs: Iterable[fx.Node]) -> bool:
    """Whether its first size is another dimension's, or its rows are looked up by values, or some by their number."""
    size = _first_size(node)
    if size == batch:
        return False
    inner = (length for other in inputs for length in shape(other)[1:] if isinstance(length, torch.SymInt))
    if any(length.node.expr == size for length in inner):
        return True
    seen, left = {node}, [(node, 0)]  # where its first dimension lies in what is made of it
    while left:
        at, place = left.pop()
        for user in at.users:
            if place == 0 and user.args and user.args[0] is at and (_looks_up(user) or _takes_some(user)):
                return True
            behind = place_in(user, at, place)
            if behind is None or user in seen:
                continue
            if behind != 0 and _first_size(user) == batch:
                return True
            seen.add(user)
            left.append((user, behind))
    return False


def _looks_up(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _LOOKS_UP and _is_data(_LOOKS_UP[node.target](*node.args))


def _takes_some(node: fx.Node) -> bool:
    """Whether it is some of the first rows, by their number."""
    if node.target is not torch.ops.aten.slice.Tensor or len(node.args) < 4 or node.args[1] != 0:
        return False
    end = node.args[3]
    return isinstance(end, int) and end < 2**62


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
