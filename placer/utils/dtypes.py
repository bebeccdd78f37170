"""Dtypes as users give them."""

from __future__ import annotations

from typing import Any

import torch

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
