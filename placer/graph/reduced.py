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

from placer.graph.batch import amounts, grows, made_of_no_input, results
from placer.graph.lying import shape


class Reduction(enum.Enum):
    """What a number is of the samples."""

    SUM = "their sum"
    MEAN = "their mean"
    LARGEST = "the largest of them"
    SMALLEST = "the smallest of them"
    TOGETHER = "what only all of them together tell"


_BY_NAME = {
    **dict.fromkeys(("sum", "nansum", "count_nonzero"), Reduction.SUM),
    **dict.fromkeys(("dot", "vdot", "inner", "matmul", "mm", "einsum"), Reduction.SUM),  # over the samples, in the end
    "mean": Reduction.MEAN,
    **dict.fromkeys(("max", "amax", "any"), Reduction.LARGEST),
    **dict.fromkeys(("min", "amin", "all"), Reduction.SMALLEST),
    **dict.fromkeys(
        ("std", "var", "norm", "linalg_vector_norm", "linalg_norm", "linalg_matrix_norm", "frobenius_norm", "prod"),
        Reduction.TOGETHER,
    ),
    **dict.fromkeys(("logsumexp", "median", "nanmedian", "quantile", "argmax", "argmin"), Reduction.TOGETHER),
    "select": Reduction.TOGETHER,  # one sample, by its number
}
_BY_REDUCTION = {1: Reduction.MEAN, 2: Reduction.SUM}
"""By the argument ``reduction`` of torch's losses."""
_AS_IT_IS = {"neg", "clone", "detach", "alias", "view", "reshape", "flatten", "squeeze", "unsqueeze", "select", "slice"}
_AS_IT_IS |= {"_to_copy", "to", "contiguous", "t", "transpose", "permute"}
_RISING = {"sqrt", "exp", "expm1", "log", "log2", "log10", "log1p", "relu", "sigmoid", "tanh", "clamp", "clamp_min"}
_CURVED = _RISING | {"rsqrt", "pow", "square", "reciprocal", "abs", "softplus"}
_SCALED = {"mul", "div", "true_divide"}
_ADDED = {"add", "sub", "rsub"}
_LINEAR = (Reduction.SUM, Reduction.MEAN)


def reductions(graph: fx.Graph, symbols: frozenset[Any]) -> dict[str, Reduction]:
    """By name, what the numbers among a graph's results are of the samples, as far as its operations tell.

    Args:
        graph: a captured one.
        symbols: of the batch's size; where it is fixed, a mean may be a sum over a constant, and nothing is told.
    """
    if not symbols:
        return {}
    reader = _Reader(symbols, amounts(graph, symbols), made_of_no_input(graph))
    found = {node.name: reader.of(node) for node in results(graph) if _is_number(node)}
    return {name: known for name, known in found.items() if known is not None}


class _Reader:
    """Tells it of what has no dimension of samples any more.

    Args:
        symbols: of the batch's size.
        amounts: the numbers that follow from it, and whether they add up.
        constants: the names of what is made of no input.
    """

    def __init__(self, symbols: frozenset[Any], amounts: dict[str, bool], constants: frozenset[str]) -> None:
        self._symbols, self._amounts, self._constants = symbols, amounts, constants

    def of(self, node: Any) -> Reduction | None:
        """What a tensor is of the samples; None where that is not seen, or it still has them."""
        if not isinstance(node, fx.Node) or not node.args or self._has_samples(node):
            return None
        name = _name(node)
        operands: Any = node.args[1] if name == "einsum" else node.args[:1]
        if any(map(self._has_samples, operands)):
            return self._reduced(node, name)
        known = self.of(node.args[0])
        if name in _AS_IT_IS:
            return _mirrored(known) if name == "neg" else known
        if name in _CURVED or node.kwargs.get("rounding_mode"):
            kept = name in _RISING and known in (Reduction.LARGEST, Reduction.SMALLEST)
            return known if kept or known is None else Reduction.TOGETHER
        if name in _SCALED:
            return self._scaled(name, *node.args[:2])
        if name in _ADDED:
            return self._added(name, *node.args[:2])
        if name in _BY_NAME and known is not None:
            further = _BY_NAME[name]
            linear = known in _LINEAR and further in _LINEAR
            return known if linear or (known is further and known not in _LINEAR) else Reduction.TOGETHER
        return None

    def _reduced(self, node: fx.Node, name: str) -> Reduction | None:
        """Of an operation on samples whose result has none."""
        if isinstance(node.target, torch._ops.OpOverload):
            places = [argument.name for argument in node.target._schema.arguments]
            if "reduction" in places:
                return _BY_REDUCTION.get(_argument(node, places.index("reduction")))
        return _BY_NAME.get(name)

    def _scaled(self, name: str, one: Any, other: Any) -> Reduction | None:
        """Of a product or a quotient with a number that no sample has a part in."""
        if name == "mul" and self.of(one) is None:
            one, other = other, one
        known = self.of(one)
        if not isinstance(other, fx.Node):
            return known if other > 0 else _mirrored(known)
        if other.name in self._constants:
            return known if known in _LINEAR else None
        grows = name != "mul" and known is Reduction.SUM and self._amounts.get(other.name, False)
        return Reduction.MEAN if grows else None

    def _added(self, name: str, one: Any, other: Any) -> Reduction | None:
        kinds = [self.of(term) for term in (one, other) if not self._is_fixed(term)]
        if None in kinds or not kinds:
            return None
        if len(kinds) == 2:
            return kinds[0] if kinds[0] is kinds[1] and kinds[0] in _LINEAR else Reduction.TOGETHER
        turned = _mirrored(kinds[0]) if (name == "sub" and self._is_fixed(one)) or name == "rsub" else kinds[0]
        return Reduction.TOGETHER if turned is Reduction.SUM else turned

    def _is_fixed(self, term: Any) -> bool:
        return not isinstance(term, fx.Node) or term.name in self._constants

    def _has_samples(self, node: Any) -> bool:
        """Whether a dimension of a tensor is the batch's."""
        return any(grows(size, self._symbols) for size in shape(node))


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
