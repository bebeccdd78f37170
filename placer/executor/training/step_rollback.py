"""Copies of buffers and random numbers' states, to be restored after a step that fails."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from placer import devices


class Kept:
    """Copies of the buffers that layers change, and the states of random number generators.

    Args:
        buffers: the buffers to keep.
        places: the devices whose generators are kept, in addition to the host's.
    """

    def __init__(self, buffers: Iterable[Tensor], places: Iterable[torch.device]) -> None:
        self._gpus = [place for place in places if place.type == "cuda"]
        self._random: list[Tensor] = []
        self._groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for buffer in buffers:
            own, copies = self._groups.setdefault(
                (devices.location(buffer), buffer.dtype), ([], [])
            )
            own.append(buffer)
            copies.append(torch.empty_like(buffer))

    @torch.no_grad()
    def save(self) -> None:
        """Copy the buffers and the states of the generators."""
        for own, copies in self._groups.values():
            torch._foreach_copy_(copies, own)
        self._random = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._gpus)]

    @torch.no_grad()
    def restore(self) -> None:
        """Give buffers and generators the values that they had when they were saved."""
        host, *others = self._random
        torch.set_rng_state(host)
        for place, state in zip(self._gpus, others, strict=True):
            torch.cuda.set_rng_state(state, place)
        for own, copies in self._groups.values():
            torch._foreach_copy_(own, copies)
