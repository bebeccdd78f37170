"""Joining of micro-batch results to the result of the batch.

    results of micro-batches ──▶ join(): each value by its rule ──▶ result of the batch

A rule is declared in ``BatchOptions.outputs``, or found by ``find_rules`` in a comparison of a
small batch with its micro-batches. Otherwise the convention applies: tensors with samples along the
batch dimension are concatenated, and scalars are averaged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.capture.batch_dims.value_names import name_of_part
from placer.capture.pytrees import container_parts, flatten
from placer.errors import InputError
from placer.schema import BatchOptions
from placer.schema.options import OTHERS, Join, rule_for
from placer.utils.dtypes import is_differentiable

# A mean with equal weights of samples, where the loss weighs them differently.
_SAMPLES_MEAN: Any = "mean over samples"

CHUNKS_1 = "call the flow with chunks=1"

Compare = Callable[[Any, Any], bool]
"""A function that returns whether two values are equal up to rounding."""

Share = float | Tensor
"""The weight of a micro-batch in a mean; a tensor stays on its device, unread by the host."""


@dataclass(frozen=True)
class Joining:
    """How the results of one kind of micro-batches are joined.

    Attributes:
        declared: rules by name, from ``BatchOptions.outputs``.
        found: rules by name, from ``find_rules``.
        dim: the batch dimension of results without a rule.
        way_out: the remedy for results that cannot be joined, for messages.
    """

    declared: Mapping[str, Join] = field(default_factory=dict)
    found: Mapping[str, Join] = field(default_factory=dict)
    dim: int = 0
    way_out: str = CHUNKS_1

    @classmethod
    def from_options(cls, options: BatchOptions, way_out: str = CHUNKS_1) -> Joining:
        """Return the joining of results before any comparison."""
        outputs = options.outputs
        declared = dict(outputs) if isinstance(outputs, dict) else {OTHERS: outputs}
        return cls(
            declared, dim=options.inputs if isinstance(options.inputs, int) else 0, way_out=way_out
        )

    def rule(self, name: str) -> Join | None:
        """Return the rule of a value; None for the convention."""
        declared = rule_for(name, self.declared, None)[0]
        return declared if declared is not None else self.found.get(name)

    @property
    def reduces_floats(self) -> bool:
        """Return whether some results are means or sums over all samples."""
        return not {"mean", "sum", _SAMPLES_MEAN}.isdisjoint(map(str, self.found.values()))


@dataclass(frozen=True)
class Difference:
    """A value of a batch that its micro-batches do not reproduce.

    Attributes:
        name: of the value; empty for a result that is one value.
        whole: its value for the batch.
        joined: its value from the micro-batches by the nearest rule; their list if no rule applies.
    """

    name: str
    whole: Any
    joined: Any


def join(
    parts: Sequence[Any],
    sizes: Sequence[int],
    joining: Joining,
    weights: Sequence[Share] | None = None,
) -> Any:
    """Join the results of all micro-batches of a batch.

    Args:
        parts: the result of each, any nest of tensors.
        sizes: samples in each.
        joining: the rules.
        weights: of each in a mean; ``sizes`` by default.

    Raises:
        InputError: if a value cannot be joined; the message names it and the declaration that
            helps.
    """
    return parts[0] if len(parts) == 1 else _Walk(sizes, joining, weights).over([*parts], "")


def find_rules(
    whole: Any,
    parts: Sequence[Any],
    sizes: Sequence[int],
    joining: Joining,
    equal: Compare,
    weights: Sequence[Share] | None = None,
) -> tuple[Joining, list[Difference], bool]:
    """Find the rules that turn micro-batch results into the result of the batch.

    Args:
        whole: the result of the batch.
        parts: the results of its micro-batches.
        sizes: samples in each.
        joining: the declared rules.
        equal: returns whether two values are equal up to rounding.
        weights: of each micro-batch in a mean; ``sizes`` by default.

    Returns:
        The joining with the found rules; the values without a valid rule; and whether another batch
        must decide between several valid rules, for example because all values are zero.
    """
    walk = _Search(sizes, joining, equal, weights)
    walk.over([*parts, whole], "")
    return (
        dataclasses.replace(joining, found={**joining.found, **walk.rules}),
        walk.differences,
        walk.is_undecided,
    )


class _Walk:
    """A simultaneous walk through the results of all micro-batches.

    Args:
        sizes: samples in each.
        joining: the rules.
        weights: of each in a mean; ``sizes`` by default.
    """

    def __init__(
        self, sizes: Sequence[int], joining: Joining, weights: Sequence[Share] | None = None
    ) -> None:
        self._sizes, self._joining = list(sizes), joining
        self._shares = _shares_of(weights or self._sizes)

    def over(self, nests: list[Any], name: str, in_object: bool = False) -> Any:
        """Join nests at this path; ``in_object`` for attributes of an object."""
        first, rule = nests[0], self._joining.rule(name)
        is_leaf = isinstance(first, Tensor) or (_is_number(first) and not in_object)
        if is_leaf or rule == "list" or callable(rule):
            return self.leaf(nests, name, rule)
        if _is_plain_sequence(first) and self.is_of_samples(nests, name, rule):
            return self.items(nests, name)
        return self._containers(nests, name, in_object)

    def _containers(self, nests: list[Any], name: str, in_object: bool) -> Any:
        """Join containers part by part."""
        first = nests[0]
        found = [container_parts(nest) for nest in nests]
        if None in found:
            return self.constant(nests, name, in_object)
        known = [one for one in found if one is not None]
        labels = [one[0] for one in known]
        if any(other != labels[0] for other in labels):
            return self.unlike(nests, name)
        columns = zip(labels[0], zip(*(one[1] for one in known), strict=True), strict=True)
        inside = _is_plain_object(first)
        made = [
            self.over([*column], name_of_part(name, label), inside) for label, column in columns
        ]
        last = found[len(self._sizes) - 1]
        return last[2](made) if last is not None else None

    def leaf(self, nests: list[Any], name: str, rule: Join | None) -> Any:
        """Join tensors or numbers."""
        return self.joined(nests, name, self.convention(nests, name) if rule is None else rule)

    def is_of_samples(self, nests: list[Any], name: str, rule: Join | None) -> bool:
        """Return whether these lists have one item per sample."""
        return rule == "items"

    def items(self, nests: list[Any], name: str) -> Any:
        """Join lists of samples."""
        return type(nests[0])([item for nest in nests[: len(self._sizes)] for item in nest])

    def constant(self, nests: list[Any], name: str, in_object: bool) -> Any:
        """Join values without parts (text, flags, functions, objects) by taking the last one."""
        if (
            isinstance(nests[0], (bool, str))
            and not in_object
            and any(nest != nests[0] for nest in nests)
        ):
            raise self.refusal(
                name, f"is {nests[0]!r} for one micro-batch and something else for another"
            )
        return nests[len(self._sizes) - 1]

    def unlike(self, nests: list[Any], name: str) -> Any:
        """Raise an InputError for nests of different structure."""
        raise self.refusal(
            name, f"is {_shown(nests[0])} for one micro-batch and of another structure for another"
        )

    def convention(self, nests: list[Any], name: str) -> Join:
        """Return the default rule of a value."""
        first = nests[0]
        if isinstance(first, Tensor) and first.dim():
            # A result may have the batch elsewhere than the inputs, and then has it first by
            # convention.
            for dim in dict.fromkeys((self._joining.dim, 0)):
                sized = zip(nests, self._sizes, strict=True)
                if all(
                    isinstance(one, Tensor) and one.dim() > dim and one.shape[dim] == size
                    for one, size in sized
                ):
                    return dim
        elif _is_float(first):
            return "mean"
        if all(_is_equal(one, first) for one in nests):
            return "same"
        raise self.refusal(
            name, f"is {_shown(first)} for the first micro-batch, which has no batch dimension"
        )

    def joined(self, parts: list[Any], name: str, rule: Join) -> Any:
        """Join tensors or numbers by a rule."""
        if callable(rule):
            return rule(parts, list(self._sizes))
        if rule == "list":
            return parts
        if isinstance(rule, int):
            return self._concatenated(parts, name, rule)
        if rule == "same" and not all(_is_equal(part, parts[0]) for part in parts):
            raise self.refusal(
                name, f"is {_shown(parts[0])} for the first micro-batch and differs for another"
            )
        # Micro-batches may return one and the same object, such as a parameter.
        if rule == "same" or (rule != "sum" and all(part is parts[0] for part in parts)):
            return parts[0]
        if rule == "items":
            raise self.refusal(name, f"is declared as 'items', and is {_shown(parts[0])}, no list")
        shares = (
            self._shares
            if rule != _SAMPLES_MEAN
            else [size / sum(self._sizes) for size in self._sizes]
        )
        return _reduced("mean" if rule == _SAMPLES_MEAN else rule, parts, shares)

    def _concatenated(self, parts: list[Any], name: str, dim: int) -> Tensor:
        shapes = [tuple(part.shape) if isinstance(part, Tensor) else () for part in parts]
        first = shapes[0]
        for shape in shapes:
            if (
                len(shape) <= dim
                or shape[:dim] + shape[dim + 1 :] != first[:dim] + first[dim + 1 :]
            ):
                raise self.refusal(
                    name, f"has shape {first} for one micro-batch and {shape} for another"
                )
        return torch.cat(parts, dim)

    def refusal(self, name: str, why: str) -> InputError:
        """Return the error for a value that cannot be joined."""
        return InputError(
            f"output {name or '(the result)'} {why}, so that the micro-batches' cannot be joined; "
            f"declare how: batch_options=BatchOptions(outputs={{{name or OTHERS!r}: ...}}) with a "
            f"dimension, 'mean', 'sum', 'items' or 'list'; or {self._joining.way_out}"
        )


class _Search(_Walk):
    """A walk through the results of micro-batches and batch, to find valid rules.

    The batch's result comes last in every list.

    Attributes:
        rules: the valid rules, by name.
        differences: the values without a valid rule.
        is_undecided: whether different rules are valid for a value, because it is zero.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        joining: Joining,
        equal: Compare,
        weights: Sequence[Share] | None,
    ) -> None:
        super().__init__(sizes, joining, weights)
        self._equal = equal
        self.rules: dict[str, Join] = {}
        self.differences: list[Difference] = []
        self.is_undecided = False

    def leaf(self, nests: list[Any], name: str, rule: Join | None) -> Any:
        """Find the rule of tensors or numbers."""
        *parts, whole = nests
        if rule == "list":
            return whole
        holding = [
            one
            for one in self._candidates(parts, whole, rule)
            if self._holds(parts, whole, name, one)
        ]
        if not holding:
            self.differences.append(Difference(name, whole, self._nearest(parts, name, rule)))
        elif rule is None:
            self.rules[name] = holding[0]
            self.is_undecided |= "sum" in holding[1:]  # only zeros satisfy both rules
        return whole

    def is_of_samples(self, nests: list[Any], name: str, rule: Join | None) -> bool:
        """Return whether these lists have one item per sample, so that their lengths add up."""
        *parts, whole = nests
        if not all(type(part) is type(whole) for part in parts):
            return False
        lengths = [len(part) for part in parts]
        return rule == "items" or (sum(lengths) == len(whole) and len(whole) not in lengths)

    def items(self, nests: list[Any], name: str) -> Any:
        """Compare lists of samples."""
        *parts, whole = nests
        made = super().items(parts, name)
        if self._are_equal(made, whole):
            self.rules[name] = "items"
        else:
            self.differences.append(Difference(name, whole, made))
        return whole

    def constant(self, nests: list[Any], name: str, in_object: bool) -> Any:
        """Compare text and flags."""
        if (
            isinstance(nests[0], (bool, str))
            and not in_object
            and any(nest != nests[0] for nest in nests)
        ):
            self.differences.append(Difference(name, nests[-1], nests[:-1]))
        return nests[-1]

    def unlike(self, nests: list[Any], name: str) -> Any:
        """Record nests of different structure."""
        self.differences.append(Difference(name, nests[-1], nests[:-1]))
        return nests[-1]

    def _candidates(self, parts: list[Any], whole: Any, declared: Join | None) -> list[Join]:
        if declared is not None:
            return [declared]
        # max and min are not tried: a value of the first samples may be the extreme one by chance
        if not isinstance(whole, Tensor) or not whole.dim():
            return ["mean", _SAMPLES_MEAN, "sum"] if _is_float(whole) else ["same", "sum"]
        dims = sorted(range(whole.dim()), key=lambda dim: dim != self._joining.dim)
        found: list[Join] = [dim for dim in dims if _adds_up(parts, whole, dim)]
        if all(isinstance(part, Tensor) and part.shape == whole.shape for part in parts):
            found += ["same", "mean", _SAMPLES_MEAN, "sum"] if _is_float(whole) else ["same", "sum"]
        return found

    def _holds(self, parts: list[Any], whole: Any, name: str, rule: Join) -> bool:
        if rule == "same":  # up to rounding
            return all(self._equal(part, whole) for part in parts)
        if rule in ("max", "min") and (
            _is_complex(whole) or not isinstance(whole, (Tensor, int, float))
        ):
            return False
        try:
            return self._are_equal(self.joined(parts, name, rule), whole)
        except InputError:
            return False

    def _are_equal(self, some: Any, others: Any) -> bool:
        (leaves, structure), (other_leaves, other) = flatten(some), flatten(others)
        return (
            structure.paths == other.paths
            and all(map(self._equal, leaves, other_leaves))
            and (bool(leaves) or self._equal(some, others))
        )

    def _nearest(self, parts: list[Any], name: str, rule: Join | None) -> Any:
        try:
            return super().leaf(parts, name, rule)
        except InputError:
            return parts


def _adds_up(parts: list[Any], whole: Tensor, dim: int) -> bool:
    """Return whether the parts' sizes along a dimension add up, and other sizes are equal."""
    if not all(isinstance(part, Tensor) and part.dim() == whole.dim() for part in parts):
        return False
    rest = [(*part.shape[:dim], *part.shape[dim + 1 :]) for part in (*parts, whole)]
    return sum(part.shape[dim] for part in parts) == whole.shape[dim] and rest.count(
        rest[0]
    ) == len(rest)


def _shares_of(weights: Sequence[Share]) -> list[Share]:
    """Return weights divided by their sum; 0 if it is 0.

    Tensors are not read, because the host would wait for them.
    """
    total = sum(weights)
    if isinstance(total, Tensor):
        return [
            torch.where(total == 0, torch.zeros_like(total), weight / total) for weight in weights
        ]
    return [weight / total if total else 0.0 for weight in weights]


def _reduced(rule: str, parts: list[Any], shares: Sequence[Share]) -> Any:
    if rule == "sum":
        return sum(parts[1:], parts[0])
    if rule == "mean":
        weighted = [_weighted(part, share) for part, share in zip(parts, shares, strict=True)]
        known = [part for part in weighted if part is not None]
        return sum(known[1:], known[0]) if known else parts[0] * 0
    if isinstance(parts[0], Tensor):
        together = torch.stack(parts)
        return together.amax(0) if rule == "max" else together.amin(0)
    return max(parts) if rule == "max" else min(parts)


def _weighted(part: Any, share: Share) -> Any:
    """Return a part times its share in a mean; None or 0 for a share of 0.

    A part of weight 0 may be NaN, such as the loss of a micro-batch without labels.
    """
    if not isinstance(share, Tensor) or not isinstance(part, Tensor):
        return part * float(share) if share else None
    share = devices.move(share, devices.location(part)).to(
        part.dtype if _is_float(part) else torch.float32
    )
    return torch.where(share == 0, torch.zeros_like(part), part * share)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)


def _is_float(value: Any) -> bool:
    return is_differentiable(value) or isinstance(value, (float, complex))


def _is_complex(value: Any) -> bool:
    return value.is_complex() if isinstance(value, Tensor) else isinstance(value, complex)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (
            one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))
        )
    return bool(one == other)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.item()}" if value.dim() == 0 else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)[:80]


def _is_plain_sequence(value: Any) -> bool:
    """Return whether a value is a list or a tuple without names."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def _is_plain_object(container: Any) -> bool:
    """Return whether a container holds its parts as attributes, and is not a dataclass."""
    is_collection = isinstance(container, (tuple, list, dict))
    return not is_collection and not dataclasses.is_dataclass(container)
