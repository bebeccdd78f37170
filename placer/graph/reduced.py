"""How a number that a model returns is made of its samples: what parts of a batch tell of that of the whole.

    sum of the samples        the sum of the parts'
    mean of the samples       their mean, each weighed by its samples
    largest, smallest         that of the parts'
    norm, variance, ...       not told by the parts'

What is not seen to be one of these, as a loss that weighs its samples, is left to who asks.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor, fx

from placer.graph.batch import amounts, grows


class Reduction(enum.Enum):
    """What a number is of the samples."""

    SUM = "their sum"
    MEAN = "their mean"
    LARGEST = "the largest of them"
    SMALLEST = "the smallest of them"
    TOGETHER = "what only all of them together tell"


_BY_NAME = {
    **dict.fromkeys(("sum", "count_nonzero"), Reduction.SUM),
    "mean": Reduction.MEAN,
    **dict.fromkeys(("max", "amax", "any"), Reduction.LARGEST),
    **dict.fromkeys(("min", "amin", "all"), Reduction.SMALLEST),
    **dict.fromkeys(
        ("std", "var", "norm", "linalg_vector_norm", "linalg_norm", "linalg_matrix_norm", "frobenius_norm", "prod"),
        Reduction.TOGETHER,
    ),
    **dict.fromkeys(("logsumexp", "median", "nanmedian", "quantile", "argmax", "argmin"), Reduction.TOGETHER),
}
_BY_REDUCTION = {1: Reduction.MEAN, 2: Reduction.SUM}
"""By the argument ``reduction`` of torch's losses."""
_AS_IT_IS = {"neg", "clone", "detach", "alias", "view", "reshape", "squeeze", "_to_copy", "to", "contiguous"}
_CURVED = {"sqrt", "rsqrt", "exp", "expm1", "log", "log2", "log10", "log1p", "pow", "square", "reciprocal"}
_SCALED = {"mul", "div", "true_divide"}
_ADDED = {"add", "sub", "rsub"}


def reductions(graph: fx.Graph, symbols: frozenset[Any]) -> dict[str, Reduction]:
    """By name, what the numbers among a graph's results are of the samples, as far as its operations tell.

    Args:
        graph: a captured one.
        symbols: of the batch's size; where it is fixed, a mean may be a sum over a constant, and nothing is told.
    """
    if not symbols:
        return {}
    reader = _Reader(symbols, amounts(graph, symbols))
    results = next(iter(graph.find_nodes(op="output"))).all_input_nodes
    found = {node.name: reader.of(node) for node in results if _is_number(node)}
    return {name: known for name, known in found.items() if known is not None}


class _Reader:
    def __init__(self, symbols: frozenset[Any], amounts: dict[str, bool]) -> None:
        self._symbols, self._amounts = symbols, amounts

    def of(self, node: fx.Node) -> Reduction | None:
        """What a number is; None where that is not seen."""
        name = _name(node)
        if name in _AS_IT_IS and _is_number(node.args[0]):
            known = self.of(node.args[0])  # type: ignore[arg-type]
            return _mirrored(known) if name == "neg" else known
        if name in _CURVED and _is_number(node.args[0]):
            return None if self.of(node.args[0]) is None else Reduction.TOGETHER  # type: ignore[arg-type]
        if name in _SCALED:
            return self._scaled(name, *node.args[:2])
        if name in _ADDED:
            kinds = {self.of(one) if _is_number(one) else None for one in node.args[:2]}  # type: ignore[arg-type]
            return kinds.pop() if kinds in ({Reduction.SUM}, {Reduction.MEAN}) else None
        if not (node.args and self._has_samples(node.args[0])):
            return None
        if isinstance(node.target, torch._ops.OpOverload):
            places = [argument.name for argument in node.target._schema.arguments]
            if "reduction" in places:
                return _BY_REDUCTION.get(_argument(node, places.index("reduction")))
        return _BY_NAME.get(name)

    def _scaled(self, name: str, one: Any, other: Any) -> Reduction | None:
        """Of a product or a quotient with a number that no sample has a part in."""
        if name == "mul" and not _is_number(one):
            one, other = other, one
        known = self.of(one) if _is_number(one) else None
        if not isinstance(other, fx.Node):
            return known if other > 0 else _mirrored(known)
        grows = name != "mul" and known is Reduction.SUM and self._amounts.get(other.name, False)
        return Reduction.MEAN if grows else None

    def _has_samples(self, node: Any) -> bool:
        """Whether a dimension of a tensor is the batch's."""
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        return isinstance(value, Tensor) and any(grows(size, self._symbols) for size in value.shape)


def _is_number(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dim() == 0


def _name(node: fx.Node) -> str:
    return node.target._schema.name.partition("::")[2] if isinstance(node.target, torch._ops.OpOverload) else ""


def _argument(node: fx.Node, place: int) -> Any:
    """The value of an argument, as given or by the operation itself."""
    argument = node.target._schema.arguments[place]  # type: ignore[union-attr]
    return node.args[place] if place < len(node.args) else node.kwargs.get(argument.name, argument.default_value)


def _mirrored(known: Reduction | None) -> Reduction | None:
    turned = {Reduction.LARGEST: Reduction.SMALLEST, Reduction.SMALLEST: Reduction.LARGEST}
    return turned.get(known, known) if known is not None else None
