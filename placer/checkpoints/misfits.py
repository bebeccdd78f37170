"""Differences between a checkpoint and a model, as one error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from placer.checkpoints.bitsandbytes_weights import unread
from placer.checkpoints.state_names import StateNames
from placer.checkpoints.transformers_models import Derived
from placer.errors import InputError
from placer.utils.units import count_text

_SHOWN = 8
"""Names of each kind in a message."""


class Misfits:
    """The differences between a checkpoint and a model.

    Args:
        model: to load into.
        names: of its state.
        path: of the checkpoint, for messages.
        strict: whether keys have to be the same.

    Attributes:
        derived: the tensors to be computed, by the ``id`` of what the model got instead.
    """

    def __init__(self, model: nn.Module, names: StateNames, path: Path, strict: bool) -> None:
        self._model, self._names, self._path, self._strict = model, names, path, strict
        self.derived: dict[int, Derived] = {}
        self._mismatches: dict[str, str] = {}
        self._contradictions: list[str] = []

    def without_mismatches(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that fit the model, under every name of their tensors.

        Tied parameters become one parameter.

        Args:
            values: by the names of the model.
        """
        found: dict[str, Any] = {}
        for name, given in values.items():
            value = given.on_meta if isinstance(given, Derived) else given
            own = self._names.tensors.get(name)
            if own is None or not isinstance(value, Tensor):
                found[name] = value
                continue
            if difference := _difference(own, value):
                self._mismatches[name] = difference
                continue
            tied = self._names.same(name)
            if (other := found.get(tied[0])) is not None:
                if not _are_equal(other, value):
                    self._contradictions.append(f"{tied[0]!r} and {name!r}")
                continue
            value = _own_object(own, value)
            found.update(dict.fromkeys(tied, value))
            if isinstance(given, Derived):
                self.derived[id(value)] = given
        return found

    def refuse(
        self, missing: Iterable[str], unexpected: Iterable[str], values: Mapping[str, Any]
    ) -> None:
        """Raise an error that lists all differences, if there are any.

        Args:
            missing: names that the model did not find.
            unexpected: keys that it does not have.
            values: of the checkpoint, by the names of the model.
        """
        given = {same for name in values for same in self._names.same(name)}
        absent = [name for name in missing if name not in given and self._is_needed(name)]
        extra = [name for name in unexpected if self._strict]
        parts = [
            _part(absent, "tensor is missing in it", "tensors are missing in it", self._described),
            _part(
                extra,
                "key is unknown to the model",
                "keys are unknown to the model",
                lambda name: f"{name} {_shape(values.get(name))}".rstrip(),
            ),
            _part(
                list(self._mismatches),
                "tensor differs",
                "tensors differ",
                lambda name: f"{name} {self._mismatches[name]}",
            ),
            _part(
                self._contradictions,
                "pair is one tied parameter and has two values",
                "pairs are tied parameters and have different values",
                str,
            ),
        ]
        if any(parts):
            raise InputError(
                f"{self._path} does not fit {type(self._model).__name__}:\n"
                + "\n".join(filter(None, parts))
                + f"\n{self._remedy(bool(absent), extra)}; the model is unchanged"
            )

    def refused_by_model(self, error: Exception) -> InputError:
        """Return the error for what the model's own methods refused."""
        return InputError(
            f"{self._path} does not fit {type(self._model).__name__}, which refused it: {error}"
        )

    def _is_needed(self, name: str) -> bool:
        tensor = self._names.tensors.get(name)
        return self._strict or (tensor is not None and tensor.is_meta)

    def _described(self, name: str) -> str:
        return f"{name} {_shape(self._names.tensors.get(name))}".rstrip()

    def _remedy(self, lacks: bool, unknown: list[str]) -> str:
        if unread(unknown):
            return (
                "Build the model with the layers of bitsandbytes that were saved, such as "
                "bitsandbytes.nn.Linear4bit"
            )
        if self._mismatches:
            return "Build the model with the configuration that the checkpoint was saved with"
        if self._contradictions:
            return "Build the model without the tie, as in config.tie_word_embeddings = False"
        if lacks:
            return "Give the checkpoint of this model, or build the model that was saved"
        return "Give the checkpoint of this model, or strict=False to ignore these keys"


def _difference(own: Tensor, value: Tensor) -> str:
    """Return how a value differs from the tensor that it is for; empty if it fits."""
    if nn.parameter.is_lazy(own):
        return ""
    # torch made scalars of one-dimensional tensors until version 0.3
    if own.shape != value.shape and not (own.dim() == 0 and value.shape == (1,)):
        return f"{_shape(value)} in the checkpoint, {_shape(own)} in the model"
    if own.is_floating_point() and not (value.is_floating_point() or value.is_complex()):
        return (
            f"{value.dtype} in the checkpoint, {own.dtype} in the model: quantised weights need "
            "the modules that read them"
        )
    return ""


def _own_object(own: Tensor, value: Tensor) -> Tensor:
    """Return a value as another object, so that keys with one value do not become a tie."""
    if not isinstance(own, nn.Parameter):
        return value.detach()
    if isinstance(value, nn.Parameter) and type(value) is not nn.Parameter:
        return value  # made for this name by the library that quantised it
    return nn.Parameter(value.detach(), requires_grad=own.requires_grad)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if one.is_meta or other.is_meta:  # computed later
        return True
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    return one.dtype == other.dtype and torch.equal(one, other)


def _shape(tensor: Any) -> str:
    if isinstance(tensor, Derived):
        tensor = tensor.on_meta
    return str(tuple(tensor.shape)) if isinstance(tensor, Tensor) else ""


def _part(names: Sequence[str], one: str, several: str, described: Any) -> str:
    if not names:
        return ""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    shown = ", ".join(described(name) for name in names[:_SHOWN])
    return f"  {count_text(len(names), one, several)}: {shown}{more}"
