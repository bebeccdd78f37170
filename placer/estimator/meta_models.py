"""Models on the device ``meta``, which have shapes and dtypes but no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from placer.errors import InputError

T = TypeVar("T")


def made_on_meta(make: Callable[[], T]) -> T:
    """Return what a function makes, on ``meta`` where possible.

    Some constructors compute with values, which ``meta`` does not have. They run a second time with
    memory.
    """
    try:
        with torch.device("meta"):
            return make()
    except Exception:
        return make()


def meta_copy(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of a model on ``meta``; the model itself is unchanged.

    Args:
        model: any module.
        dtype: of floating-point parameters and buffers; None: unchanged.

    Raises:
        InputError: the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = _on_meta(tensor, dtype)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} cannot be copied, as dtype and generate need it: "
            f"{type(error).__name__}: {error}"
        ) from error


def cast(inputs: Any, dtype: torch.dtype | None) -> Any:
    """Return inputs with floating-point tensors of a dtype; None leaves them unchanged."""
    if dtype is None:
        return inputs
    from torch.utils._pytree import tree_map

    def changed(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_float else leaf

    return tree_map(changed, inputs)


def _on_meta(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    made = torch.empty_like(tensor, device="meta", dtype=kind)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made
