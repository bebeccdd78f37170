"""What ``placer.testing.logical_devices`` is told, and what it tells: where tensors are on CPU
stand-ins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Registry(Protocol):
    """Knows which stand-in each tensor is on."""

    def device(self, tensor: Tensor) -> torch.device:
        """Where the tensor is."""

    def land(self, tensor: Tensor, device: torch.device) -> None:
        """Note that the tensor was copied to the device."""

    def expect(self, tensor: Tensor, device: torch.device) -> None:
        """Raise a MixedDevicesError if the tensor, a gradient, is not there."""

    def only(self, device: torch.device) -> AbstractContextManager[None]:
        """Raise a MixedDevicesError if an operation inside meets tensors of another device."""

    def answering(self) -> AbstractContextManager[None]:
        """In it ``tensor.device`` is where the tensor is also in backward passes, where torch
        leaves that to nobody.
        """


class Onlooker:
    """A hook on a parameter that looks at its gradient and changes nothing, so that no work has to
    be left out for it.

    The user's own hooks may do anything, and run where autograd adds to the parameter itself.
    """

    def __call__(self, leaf: Tensor) -> None:
        """Look at the gradient that a leaf was given."""
        raise NotImplementedError


# Set by placer.testing.logical_devices: how many stand-ins there are, innermost last, and who knows
# where tensors are.
stand_ins: list[int] = []


registries: list[Registry] = []


_observed: list[bool] = [True]


@contextmanager
def unobserved() -> Iterator[None]:
    """Let ``logical_devices`` look away: what runs inside (capture, measuring) is no part of the
    user's computation.
    """
    _observed.append(False)
    try:
        yield
    finally:
        _observed.pop()


def answering() -> AbstractContextManager[None]:
    """In it tensors on stand-ins say where they are: for what is run again in a backward pass."""
    return registries[-1].answering() if registries else nullcontext()


def observed() -> bool:
    """Whether ``logical_devices`` should look."""
    return _observed[-1]
