"""Equality of results up to rounding, and descriptions of differences.

Norms are compared, not single numbers: ``|one - other| <= tolerance * max(|other|, 0.01 *
sqrt(count))``. Rounding grows with the depth of a model, and a single small number may lose all of
its digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.capture import autocast
from placer.utils.dtypes import is_differentiable

TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""Relative tolerance by the coarsest dtype involved: about a thousand roundings."""

COARSEST = 0.1
"""Relative tolerance for types of at most 8 bits."""

# Values below this times the tolerance are indistinguishable from zero.
_FLOOR = 1e-2

# This times the tolerance is the share of integers (such as argmax indices) that may differ,
# because ties are resolved arbitrarily.
_INDICES = 10


@dataclass(frozen=True)
class Closeness:
    """Equality up to the rounding of a dtype.

    Attributes:
        tolerance: relative.
    """

    tolerance: float

    @classmethod
    def for_tensors(cls, tensors: Iterable[Any]) -> Closeness:
        """Return the tolerance for computations with these tensors, under the caller's autocast."""
        types = {
            item.dtype for item in tensors if isinstance(item, Tensor) and item.is_floating_point()
        }
        cast = autocast.current_dtype()
        types |= set() if cast is None else {cast}
        return cls(
            max(
                (TOLERANCES.get(kind, COARSEST) for kind in types),
                default=TOLERANCES[torch.float32],
            )
        )

    def __call__(self, one: Any, other: Any) -> bool:
        """Return whether two values are equal up to rounding."""
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return one.shape == other.shape and self._are_close(one, other)
        if isinstance(one, (int, float, complex)) and isinstance(other, (int, float, complex)):
            if one == other or (one != one and other != other):
                return True
            tolerance = max(self.tolerance, TOLERANCES[torch.float64])
            return abs(one - other) <= tolerance * max(abs(other), _FLOOR)
        return bool(one == other)

    def _are_close(self, one: Tensor, other: Tensor) -> bool:
        one, other = _plain(one), _plain(other)
        if not is_differentiable(one):
            unlike = int((one != other).sum())
            return unlike <= (
                _INDICES * self.tolerance * one.numel() if one.dtype != torch.bool else 0
            )
        finite = torch.isfinite(other)
        if not torch.equal(finite, torch.isfinite(one)):
            return False
        one, other = one[finite], other[finite]
        norm = max(float(other.norm()), _FLOOR * math.sqrt(max(1, other.numel())))
        tolerance = max(self.tolerance, TOLERANCES.get(one.dtype, 0.0))
        return float((one - other).norm()) <= tolerance * norm


def shown(one: Any, other: Any) -> str:
    """Return a short description of two values: the numbers, or the most different entries."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return f"{_brief(one)} and {_brief(other)}"
    if one.shape != other.shape:
        return f"tensors of shape {tuple(one.shape)} and {tuple(other.shape)}"
    first, second = _plain(one), _plain(other)
    if not first.dim():
        return f"{first.item():.6g} and {second.item():.6g}"
    apart = (
        (first.to(torch.complex128 if first.is_complex() else torch.float64) - second)
        .abs()
        .nan_to_num(math.inf)
    )
    place = [int(index) for index in torch.unravel_index(apart.argmax(), apart.shape)]
    return f"{first[tuple(place)].item():.6g} and {second[tuple(place)].item():.6g} at {place}"


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return (
            f"{_plain(value).item():.6g}"
            if not value.dim()
            else f"a tensor of shape {tuple(value.shape)}"
        )
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)[:60]


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor's values on the host in double precision."""
    tensor = devices.move(tensor.detach(), devices.HOST)
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor
