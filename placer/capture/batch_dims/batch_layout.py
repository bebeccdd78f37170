"""The positions of a batch's samples in its values, and the split into micro-batches.

    inputs, BatchOptions ──▶ BatchLayout: number of samples, and the batch dimension of each tensor
                                 └──▶ cut(): the values of each micro-batch

Options refer to values by names such as ``images``, ``targets.0.boxes`` and ``logits``.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from placer.capture.batch_dims.value_names import name_of_part
from placer.capture.pytrees import Structure, container_parts
from placer.errors import InputError
from placer.utils.units import listed

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class Part(NamedTuple):
    """The inputs of a micro-batch, or of an uncut batch.

    Attributes:
        tensors: flattened.
        inputs: their structure.
        dims: the batch dimension of each; None without one.
    """

    tensors: list[Any]
    inputs: Structure
    dims: tuple[int | None, ...]


@dataclass(frozen=True)
class BatchLayout:
    """The positions of the samples in inputs or in a target.

    Attributes:
        size: number of samples.
        dims: the batch dimension of each tensor; None if every micro-batch gets the whole tensor.
        names: of the tensors.
        declared: for each tensor, whether the options name it.
        lists: names of lists whose items are samples.
        packed: name of a PackedSequence that would be cut; None without one.
        misfit: the message about a declaration that fits none of these values; empty if all fit.
            The declaration may fit the values of another call, so it is an error only if these
            values are cut or measured.
    """

    size: int
    dims: tuple[int | None, ...]
    names: tuple[str, ...]
    declared: tuple[bool, ...]
    lists: frozenset[str] = frozenset()
    packed: str | None = None
    misfit: str = ""

    def undeclared(self) -> list[int]:
        """Return the positions of tensors that are cut although no option names them."""
        each = enumerate(zip(self.dims, self.declared, strict=True))
        return [place for place, (dim, named) in each if dim is not None and not named]

    def without(self, whole: Collection[int]) -> BatchLayout:
        """Return the layout with uncut tensors at these positions.

        Args:
            whole: positions of the tensors to leave whole.
        """
        return replace(
            self, dims=tuple(None if place in whole else dim for place, dim in enumerate(self.dims))
        )

    def description(self) -> str:
        """Return a description of the cuts, for messages."""
        pairs = zip(self.names, self.dims, strict=True)
        cuts = [
            f"{name or 'the target'} along dimension {dim}"
            for name, dim in pairs
            if dim is not None
        ]
        cuts += [f"{name or 'the target'} by its items" for name in sorted(self.lists)]
        return listed(cuts, 4) or "no value was cut"

    def cut(self, tensors: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
        """Return the tensors of each micro-batch; there must be no lists of samples.

        Args:
            tensors: in the order of ``dims``.
            sizes: number of samples in each micro-batch.

        Raises:
            InputError: a tensor to cut is sparse or belongs to a PackedSequence, or a declaration
                fits none of the values.
        """
        self._refuse_to_cut(sizes)
        columns = [
            cut_tensor(*column, sizes)
            for column in zip(tensors, self.dims, self.names, strict=True)
        ]
        return [[column[index] for column in columns] for index in range(len(sizes))]

    def cut_call(self, call: Call, parameters: Parameters, sizes: Sequence[int]) -> list[Call]:
        """Return the arguments of each micro-batch, with lists of samples cut by their items.

        Args:
            call: positional and keyword arguments.
            parameters: of the model's forward method.
            sizes: number of samples in each micro-batch.

        Raises:
            InputError: as ``cut``.
        """
        count = len(call[0])
        named = [
            list(part.items()) for part in self.cut_values(call_values(call, parameters), sizes)
        ]
        return [(tuple(value for _, value in part[:count]), dict(part[count:])) for part in named]

    def cut_values(self, values: Mapping[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
        """Return the values of each micro-batch, with lists of samples cut by their items.

        Args:
            values: nested values by name.
            sizes: number of samples in each micro-batch.

        Raises:
            InputError: as ``cut``.
        """
        self._refuse_to_cut(sizes)
        dims = {
            name: dim for name, dim in zip(self.names, self.dims, strict=True) if dim is not None
        }
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [
            {name: self._slice(value, name, dims, start, size) for name, value in values.items()}
            for start, size in zip(starts, sizes, strict=True)
        ]

    def _slice(self, value: Any, name: str, dims: Mapping[str, int], start: int, size: int) -> Any:
        if name in self.lists:
            return type(value)(value[start : start + size])
        if isinstance(value, Tensor):
            return (
                _require_strided(value, name).narrow(dims[name], start, size)
                if name in dims
                else value
            )
        if not any(not name or one.startswith(f"{name}.") for one in (*self.lists, *dims)):
            return value
        labels, children, assemble = container_parts(value) or ([], [], lambda _: value)
        each = zip(labels, children, strict=True)
        return assemble(
            [
                self._slice(child, name_of_part(name, label), dims, start, size)
                for label, child in each
            ]
        )

    def refuse_misfit(self) -> None:
        """Raise an InputError if a declaration fits none of the values."""
        if self.misfit:
            raise InputError(self.misfit)

    def _refuse_to_cut(self, sizes: Sequence[int]) -> None:
        if len(sizes) < 2:
            return
        self.refuse_misfit()
        if self.packed is not None:
            raise InputError(
                f"{self.packed or 'it'} is a PackedSequence, whose rows mix steps of several "
                "samples, so it cannot be cut into micro-batches; give the padded tensor and its "
                "lengths, or chunks=1"
            )


def cut_tensor(tensor: Any, dim: int | None, name: str, sizes: Sequence[int]) -> Sequence[Any]:
    """Return a tensor's part for each micro-batch.

    Args:
        tensor: the tensor.
        dim: the dimension to cut along; None gives every micro-batch the whole tensor.
        name: of the tensor, for messages.
        sizes: number of samples in each micro-batch.

    Raises:
        InputError: the tensor is sparse.
    """
    if dim is None or len(sizes) == 1:
        return [tensor] * len(sizes)
    parts: Sequence[Any] = _require_strided(tensor, name).split(list(sizes), dim)  # type: ignore[no-untyped-call]
    return parts


def _require_strided(tensor: Tensor, name: str) -> Tensor:
    if tensor.layout != torch.strided:
        raise InputError(
            f"{name or 'a tensor'} of shape {tuple(tensor.shape)} is {tensor.layout}, which cannot "
            "be cut into micro-batches; convert it by .to_dense(), or chunks=1"
        )
    return tensor


class Parameters(NamedTuple):
    """The parameters of a model's forward method.

    Attributes:
        positional: names of the parameters that can be given by position.
        known: names of all parameters, without ``*args`` and ``**kwargs``.
        is_open: whether forward also takes arguments of other names.
    """

    positional: tuple[str, ...] = ()
    known: frozenset[str] = frozenset()
    is_open: bool = True

    @classmethod
    def from_module(cls, module: nn.Module) -> Parameters:
        """Return the parameters of a module's forward method."""
        try:
            found = inspect.signature(module.forward).parameters.values()
        # A scripted method has no signature.
        except (TypeError, ValueError):
            return cls()
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        open_kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        positional = tuple(one.name for one in found if one.kind in by_position)
        known = frozenset(one.name for one in found if one.kind not in open_kinds)
        return cls(positional, known, any(one.kind in open_kinds for one in found))

    def name_of(self, place: int) -> str:
        """Return the name of an argument that is given by position."""
        return self.positional[place] if place < len(self.positional) else str(place)

    def renamed(self, name: str) -> str:
        """Return a name whose leading position, if any, is replaced by the parameter's name."""
        first, dot, rest = name.partition(".")
        return f"{self.name_of(int(first))}{dot}{rest}" if first.isdecimal() else name


UNKNOWN_PARAMETERS = Parameters()
"""The parameters of an unknown model."""


def call_values(call: Call, parameters: Parameters) -> dict[str, Any]:
    """Return a call's arguments by name, in their order."""
    return {parameters.name_of(place): one for place, one in enumerate(call[0])} | call[1]
