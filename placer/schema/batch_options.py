"""Batch layout: batch dimensions, loss reduction, and joining of micro-batch results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_serializer,
    field_validator,
)
from pydantic.json_schema import SkipJsonSchema

from placer.schema.base import Name, Wire

_LAST_DIMENSION = 63  # tensors have at most 64 dimensions
Dimension = Annotated[int, Field(ge=0, le=_LAST_DIMENSION)]
"""A dimension of a tensor, from 0."""

Cut = Dimension | Literal["items"] | None
"""How a value is split into micro-batches: along a dimension, by the items of a list, or not
(None)."""

Reduced = Literal["mean", "sum", "max", "min", "same"]
JoinName = Dimension | Literal["items", "list"] | Reduced
Joiner = Callable[[list[Any], list[int]], Any]
"""A function from the micro-batches' results and sample counts to the batch's result."""
Join = JoinName | SkipJsonSchema[Joiner]
"""How results are joined: concatenated along a dimension or as lists, reduced, kept separate, or by
a function."""

Weigh = Callable[[Any, Any], Any]
"""A function from a batch's inputs and target to the weight of each sample in the loss, a tensor of
shape ``(N,)``."""

_CUTS: tuple[str, ...] = ("items",)
_JOINS: tuple[str, ...] = ("items", "list", *get_args(Reduced))

OTHERS = "*"
"""The name that matches every value without an entry of its own."""

Rule = TypeVar("Rule")


class BatchOptions(Wire):
    """How a batch is split into micro-batches, and how their results and losses are joined.

    A value is named as in the model: an input by its parameter of ``forward`` (or its position),
    and its parts by key, index or attribute after a dot (``"targets"``, ``"batch.pixel_values"``,
    ``"0"``). Parts of targets and results are named likewise (``"logits"``, ``"losses.aux"``,
    ``"1"``). An entry applies to everything below it. ``"*"`` matches all values without an entry.

        BatchOptions(inputs=1)                                        # (length, batch, features)
        BatchOptions(inputs={"images": "items"}, target="items")      # lists of images and targets
        BatchOptions(inputs={"table": None}, outputs={"hidden": 1})   # not split; joined along 1
        BatchOptions(reduction="sum")                                 # a loss that is a sum

    Attributes:
        inputs: the batch dimension, 0 by default; ``"items"`` for a list with one item per sample;
            None for values that every micro-batch receives whole; or a dictionary of these by name.
            The first split value determines the number of samples. Tensors without an entry that
            have another size in that dimension are not split.
        target: the same for the target of a training step. ``"auto"`` (default): along the first
            dimension; if ``inputs`` declares another one, along the dimension whose size is the
            number of samples, preferring the dimension of ``inputs``.
        outputs: how results of micro-batches are joined: along a dimension, by ``"items"``, as
            ``"mean"`` (weighted by samples, or by ``weigh``), ``"sum"``, ``"max"``, ``"min"``,
            ``"same"`` (equal in all), ``"list"`` (neither joined nor compared), or ``f(parts,
            sizes)``. Without an entry, verification determines the rule. Without verification,
            tensors are joined along the dimension of ``inputs``, and scalars by their mean.
        reduction: whether the loss of a batch is the mean over its samples (default) or their sum.
        weigh: ``weigh(inputs, target)``, the weight of each sample in a loss that is a weighted
            mean, shape ``(N,)``: its number of labels, for instance. Functions here and in
            ``outputs`` are not part of the JSON form.
        verify: whether to compare a small slice of the first batch of each kind, split and unsplit,
            and the first loss with the loss of the whole batch (default True). A difference raises
            a ``BatchError``.
    """

    inputs: Cut | dict[Name, Cut] = 0
    target: Cut | Literal["auto"] | dict[Name, Cut] = "auto"
    outputs: Join | dict[Name, Join] = Field(default_factory=dict)
    reduction: Literal["mean", "sum"] = "mean"
    weigh: SkipJsonSchema[Weigh | None] = Field(default=None, exclude=True)
    verify: bool = True

    @field_validator("inputs", "target", "outputs", mode="before")
    @classmethod
    def _refuse_other_rules(cls, given: Any, field: ValidationInfo) -> Any:
        """Raise a ValueError that lists the allowed rules, instead of one error per branch."""
        is_cut = field.field_name != "outputs"
        allowed = _CUTS if is_cut else _JOINS
        if isinstance(given, Mapping):
            # positions are names, too
            given = {str(name): rule for name, rule in given.items()}
        for name, rule in given.items() if isinstance(given, dict) else [("", given)]:
            if not _is_allowed(rule, name, field.field_name):
                words = ", ".join(repr(word) for word in allowed)
                rest = "None" if is_cut else "a function of parts and sizes"
                where = f" for {name!r}" if name else ""
                raise ValueError(
                    f"{rule!r}{where} is not a rule; give a dimension (0, 1, ...), {words} or "
                    f"{rest}"
                )
        return given

    @field_serializer("outputs", mode="wrap")
    def _without_functions(self, outputs: Any, handler: SerializerFunctionWrapHandler) -> Any:
        # functions cannot be serialised; a reader of the JSON uses the defaults instead
        if callable(outputs):
            return {}
        if isinstance(outputs, dict):
            outputs = {name: join for name, join in outputs.items() if not callable(join)}
        return handler(outputs)


def rule_for(name: str, rules: Mapping[str, Rule], default: Rule) -> tuple[Rule, str]:
    """Return the rule of a value, and the name of the entry that defines it.

    Args:
        name: of the value, with dots before its parts.
        rules: by name; an entry applies to everything below it.
        default: the rule of a value without an entry, if ``"*"`` has none.

    Returns:
        The rule of the longest matching name, and that name; ``"*"`` for any other value.
    """
    # the name itself first, then the values around it: "a.b.c", "a.b", "a"
    while name:
        if name in rules:
            return rules[name], name
        name = name.rpartition(".")[0]
    return rules.get(OTHERS, default), OTHERS


def _is_allowed(rule: Any, name: str, field_name: str | None) -> bool:
    """Return whether a rule of the field is valid; ``name`` is empty for a rule of all values."""
    is_cut = field_name != "outputs"
    # ``type`` instead of isinstance: True and False are ints, but not dimensions
    if type(rule) is int:
        return 0 <= rule <= _LAST_DIMENSION
    if isinstance(rule, str) and rule in (_CUTS if is_cut else _JOINS):
        return True
    if rule == "auto" and field_name == "target" and not name:
        return True
    return rule is None if is_cut else callable(rule)
