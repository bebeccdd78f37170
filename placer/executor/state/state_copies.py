"""Copies of state on devices that read it without owning it, one per tensor and device.

    table on the host ──▶ copy on cuda:0, read there by the layers of all calls and streams
                      └─▶ copy on cuda:1

Plain tensors always stay in place and are read as copies. A parameter or buffer is copied if layers
on several devices share it and no gradient must flow back to it.
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
        tensor: the copy. Its address never changes, so recorded passes may read it.
    """

    @torch.inference_mode(False)  # training cannot use tensors created in inference mode
    def __init__(self, original: Tensor, place: torch.device) -> None:
        self._original = original
        self._written = writes([original])
        self.tensor = devices.copy(original, place)

    @property
    def is_current(self) -> bool:
        """Return whether the original has not been written to since it was copied."""
        return writes([self._original]) == self._written

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the original again if it was written to."""
        written = writes([self._original])
        if written != self._written:
            devices.fill(self.tensor, self._original)
            self._written = written


class Copies:
    """The copies of one model's state, each kept as long as it has a reader."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[int, torch.device], Copy] = WeakValueDictionary()

    def get(self, tensor: Tensor, place: torch.device) -> Copy:
        """Return the current copy of a tensor on a device; create it if necessary."""
        # a copy keeps its original alive, so the original's id is not reused
        copy = self._known.get((id(tensor), place))
        if copy is None:
            copy = self._known[id(tensor), place] = Copy(tensor, place)
        copy.refresh()
        return copy


def are_current(copies: Iterable[Copy]) -> bool:
    """Return whether no original has been written to since its copy was made."""
    return all(copy.is_current for copy in copies)
