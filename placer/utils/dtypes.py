"""Dtypes as users give them, and tensors that gradients may have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from placer.errors import InputError, kind_of


def as_dtype(given: Any) -> torch.dtype | None:
    """Return a dtype from its name or itself; None stays None.

    Raises:
        InputError: torch has no such floating-point dtype.
    """
    if given is None:
        return None
    found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        shown = repr(given) if isinstance(given, str) else kind_of(given)
        raise InputError(f"dtype is {shown}; give float32, bfloat16, float16, ...")
    return found


def is_differentiable(value: Any) -> bool:
    """Return whether a value is a tensor of real or complex floating-point numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
