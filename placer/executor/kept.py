"""Buffers as they were, for a step that fails."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from placer import devices


class Kept:
    """Copies of the buffers that layers change.

    Args:
        buffers: those to keep.
    """

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for buffer in buffers:
            own, copies = self._groups.setdefault((devices.location(buffer), buffer.dtype), ([], []))
            own.append(buffer)
            copies.append(torch.empty_like(buffer))

    @torch.no_grad()
    def save(self) -> None:
        """Copy them."""
        for own, copies in self._groups.values():
            torch._foreach_copy_(copies, own)

    @torch.no_grad()
    def restore(self) -> None:
        """Give them the values back that they had when they were copied."""
        for own, copies in self._groups.values():
            torch._foreach_copy_(own, copies)
