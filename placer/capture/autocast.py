"""The caller's ``torch.autocast`` in a pipeline: on in forward passes, off in backward passes.

The cache of cast weights is never used. Autocast keeps it until its region ends, and a recorded
pass would read a cast copy that is freed or outdated. So passes cast for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

_KINDS = ("cpu", "cuda")


def current_dtypes() -> Hashable:
    """Return the dtype that autocast casts to for each kind of device; None where it is off."""
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in _KINDS
    )


def current_contexts() -> list[Callable[[], AbstractContextManager[Any]]]:
    """Return functions that open this thread's autocast in another thread."""
    cached = torch.is_autocast_cache_enabled()
    return [
        partial(torch.autocast, kind, torch.get_autocast_dtype(kind), cache_enabled=cached)
        for kind in _KINDS
        if torch.is_autocast_enabled(kind)
    ]


def current_dtype() -> torch.dtype | None:
    """Return the dtype that autocast casts to, of GPUs if it is on for both; None if it is off."""
    kinds = [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]
    return torch.get_autocast_dtype(kinds[-1]) if kinds else None


def uncached(device: torch.device) -> AbstractContextManager[Any]:
    """Return the caller's autocast on a device, without its cache.

    Args:
        device: where operations will run.
    """
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, torch.get_autocast_dtype(device.type), cache_enabled=False)


def disabled(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast on a device.

    Args:
        device: where operations will run.
    """
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def cast_for_matmul(tensor: Tensor) -> Tensor:
    """Return a tensor as autocast casts it for a matrix product, differentiably.

    Args:
        tensor: the tensor; it is returned itself if autocast is off.
    """
    kind = tensor.device.type
    if (
        not torch.is_autocast_enabled(kind)
        or not tensor.is_floating_point()
        or tensor.dtype == torch.float64
    ):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))
