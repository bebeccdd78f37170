"""The caller's ``torch.autocast`` around a pipeline: in force forwards, off backwards, and never
with cached weights.

Autocast keeps the cast copies of weights until its region ends. A recorded pass would read such a
copy long after it is gone or out of date, so passes cast for themselves.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_KINDS = ("cpu", "cuda")


def state() -> Hashable:
    """What the caller's autocast does now, by kind of device: the type that it casts to, None where
    it is off.
    """
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in _KINDS
    )


def dtype() -> torch.dtype | None:
    """The type that the caller's autocast casts to, of GPUs if it is on for both; None where it is
    off.
    """
    kinds = [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]
    return torch.get_autocast_dtype(kinds[-1]) if kinds else None


def uncached(device: torch.device) -> AbstractContextManager[Any]:
    """The caller's autocast on a device, without its cache."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, torch.get_autocast_dtype(device.type), cache_enabled=False)


def off(device: torch.device) -> AbstractContextManager[Any]:
    """No autocast on a device."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def cast(tensor: Tensor) -> Tensor:
    """A tensor as autocast hands it to a matrix product, differentiable; itself where autocast is
    off.
    """
    kind = tensor.device.type
    if (
        not torch.is_autocast_enabled(kind)
        or not tensor.is_floating_point()
        or tensor.dtype == torch.float64
    ):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))
