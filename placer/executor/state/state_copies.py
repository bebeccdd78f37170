"""Copies of state on devices that read it and do not own it: one for each tensor and device, kept
up to date.

    table on the host ──▶ copy on cuda:0, which the layers of all calls and streams there read
                      └─▶ copy on cuda:1

Plain tensors always stay where they are and are read as copies. A parameter or buffer is copied
where layers of several devices share it and no gradient has to flow back to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from placer import devices
from placer.executor.state.tensor_versions import writes


class Copy:
    """A copy of a tensor on another device.

    Args:
        original: the tensor.
        place: the device.

    Attributes:
        tensor: the copy. It stays the same tensor, at the same address, so that recorded passes may
            read it.
    """

    @torch.inference_mode(False)  # training could not use a tensor that is made inside it
    def __init__(self, original: Tensor, place: torch.device) -> None:
        self._original = original
        self._written = writes([original])
        self.tensor = devices.copy(original, place)

    @property
    def is_current(self) -> bool:
        """Whether nobody has written to the original since it was copied."""
        return writes([self._original]) == self._written

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the original again if somebody has written to it."""
        written = writes([self._original])
        if written != self._written:
            devices.fill(self.tensor, self._original)
            self._written = written


class Copies:
    """The copies of one model's state. A copy is kept as long as something that reads it is kept."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[int, torch.device], Copy] = WeakValueDictionary()

    def get(self, tensor: Tensor, place: torch.device) -> Copy:
        """Return the copy of a tensor on a device, up to date; make it if there is none."""
        # a copy holds its original, so that no other has its identity
        copy = self._known.get((id(tensor), place))
        if copy is None:
            copy = self._known[id(tensor), place] = Copy(tensor, place)
        copy.refresh()
        return copy


def are_current(copies: Iterable[Copy]) -> bool:
    """Whether nobody has written to the original of any copy since it was made."""
    return all(copy.is_current for copy in copies)
