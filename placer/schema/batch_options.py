"""What a batch is: where its samples lie, how its loss is reduced, and how results of micro-batches
are joined.
"""

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

_LAST_DIMENSION = 63  # torch's tensors have at most 64 dimensions
Dimension = Annotated[int, Field(ge=0, le=_LAST_DIMENSION)]
"""A dimension of a tensor, counted from 0."""

Cut = Dimension | Literal["items"] | None
"""How an input or a target is cut into micro-batches: along a dimension, by the items of a list, or
not at all."""

Reduced = Literal["mean", "sum", "max", "min", "same"]
JoinName = Dimension | Literal["items", "list"] | Reduced
Joiner = Callable[[list[Any], list[int]], Any]
"""From the results of micro-batches, and the number of samples in each, to the result of the batch.
"""
Join = JoinName | SkipJsonSchema[Joiner]
"""How results are joined: concatenated along a dimension or as lists, reduced, kept apart, or by a
function."""

Weigh = Callable[[Any, Any], Any]
"""From the inputs and the target of a batch to the weight of each sample in the loss, a tensor of
shape ``(N,)``."""

_CUTS: tuple[str, ...] = ("items",)
_JOINS: tuple[str, ...] = ("items", "list", *get_args(Reduced))

OTHERS = "*"
"""The name that stands for every value without an entry of its own."""

Rule = TypeVar("Rule")


class BatchOptions(Wire):
    """How a batch is cut into micro-batches, and how their results and losses make those of the
    batch.

    A value is named as the model names it: an input by its parameter of ``forward`` (or its
    position), a part of it with the key, index or attribute behind a dot (``"targets"``,
    ``"batch.pixel_values"``, ``"0"``); a part of the target or of a result likewise (``"logits"``,
    ``"losses.aux"``, ``"1"``). An entry holds for all that is below it. ``"*"`` stands for all
    values without an entry.

        BatchOptions(inputs=1)                                        # (length, batch, features)
        BatchOptions(inputs={"images": "items"}, target="items")      # a list of images, a list of targets
        BatchOptions(inputs={"table": None}, outputs={"hidden": 1})   # not cut; joined along dimension 1
        BatchOptions(reduction="sum")                                 # the loss is a sum over samples

    Attributes:
        inputs: the dimension that is the batch, 0 by default; ``"items"`` for a list with one item
            for each sample; None for what every micro-batch is given whole; or one of these for
            each name. The first value that is cut gives the number of samples. Tensors without an
            entry of their own that have another size there go whole.
        target: the same for the target of a training step. ``"auto"``: along the first dimension;
            if ``inputs`` declares another one, along the dimension whose size is the number of
            samples, of several the dimension of ``inputs``.
        outputs: how results of micro-batches are joined: along a dimension, by ``"items"``, as
            ``"mean"`` (weighted by samples, or by ``weigh``), ``"sum"``, ``"max"``, ``"min"``,
            ``"same"`` (equal in all), ``"list"`` (not joined, nor compared), or ``f(parts,
            sizes)``. Results without an entry are joined as verification finds; without
            verification, along the dimension of ``inputs`` or, for single numbers, by their mean.
        reduction: whether the loss of a batch is the mean over its samples or their sum.
        weigh: ``weigh(inputs, target)``, the weight of each sample in a loss that is a weighted
            mean, shape ``(N,)``: its number of labels, for instance. Not part of the JSON form, nor
            are functions in ``outputs``.
        verify: compare a small slice of the first batch of each kind, cut and whole, and the first
            loss with that of the whole batch. A difference raises a ``BatchError``.
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
        """Raise a ValueError that states all that is allowed, where pydantic would tell of each
        branch.
        """
        is_cut = field.field_name != "outputs"
        allowed = _CUTS if is_cut else _JOINS
        if isinstance(given, Mapping):
            # a position is a name, too
            given = {str(name): rule for name, rule in given.items()}
        for name, rule in given.items() if isinstance(given, dict) else [("", given)]:
            is_dimension = type(rule) is int and 0 <= rule <= _LAST_DIMENSION
            is_known = (rule is None and is_cut) or (isinstance(rule, str) and rule in allowed)
            is_known |= rule == "auto" and field.field_name == "target" and not name
            if not (is_dimension or is_known or (callable(rule) and not is_cut)):
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
        if callable(outputs):
            return {}
        if isinstance(outputs, dict):
            outputs = {name: join for name, join in outputs.items() if not callable(join)}
        return handler(outputs)


def rule_for(name: str, rules: Mapping[str, Rule], default: Rule) -> tuple[Rule, str]:
    """Return the rule of a value and the name of the entry that has it.

    Args:
        name: of the value, parts behind dots.
        rules: by name; an entry holds for all that is below it.
        default: the rule of a value without an entry, if ``"*"`` has none.

    Returns:
        The rule of the longest name that the value is or is below; and that name, ``"*"`` for any
        other value.
    """
    while name:
        if name in rules:
            return rules[name], name
        name = name.rpartition(".")[0]
    return rules.get(OTHERS, default), OTHERS
