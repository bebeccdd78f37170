"""The interface between this package and ``placer.testing.logical_devices``.

It records which CPU stand-in holds each tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Registry(Protocol):
    """A record of the stand-in that holds each tensor."""

    def device(self, tensor: Tensor) -> torch.device:
        """Return the tensor's stand-in."""

    def land(self, tensor: Tensor, device: torch.device) -> None:
        """Note that the tensor was copied to the device."""

    def expect(self, tensor: Tensor, device: torch.device) -> None:
        """Raise a MixedDevicesError if the tensor, a gradient, is on another stand-in."""

    def only(self, device: torch.device) -> AbstractContextManager[None]:
        """Raise a MixedDevicesError if an operation inside reads tensors of another device."""

    def joined(self) -> AbstractContextManager[None]:
        """Check the operations of this thread, too, unless they are checked."""

    def answering(self) -> AbstractContextManager[None]:
        """Report stand-ins from ``tensor.device`` in backward passes, too.

        Torch does not dispatch that attribute there.
        """


class Onlooker:
    """A gradient hook that only reads, so that optimisations may skip it safely.

    User hooks may do anything; they run where autograd accumulates into the parameter itself.
    """

    def __call__(self, leaf: Tensor) -> None:
        """Read the gradient that a leaf received."""
        raise NotImplementedError


# Set by placer.testing.logical_devices: the number of stand-ins, innermost block last, and the
# records of where tensors are.
stand_ins: list[int] = []


registries: list[Registry] = []


def are_asynchronous(places: Iterable[torch.device]) -> bool:
    """Return whether the host goes on while a device works; CPU stand-ins count as such devices.

    Args:
        places: the devices.
    """
    return bool(stand_ins) or any(place.type != "cpu" for place in places)


class _Observed(threading.local):
    """Whether ``logical_devices`` checks the operations of a thread."""

    def __init__(self) -> None:
        self.now = True


_observed = _Observed()


@contextmanager
def unobserved() -> Iterator[None]:
    """Suspend the checks of ``logical_devices``: capture and measuring are not user work.

    Other threads go on being checked.
    """
    before, _observed.now = _observed.now, False
    try:
        yield
    finally:
        _observed.now = before


def joined() -> AbstractContextManager[None]:
    """Check the operations of this thread, too: torch's modes belong to one thread."""
    return registries[-1].joined() if registries else nullcontext()


def answering() -> AbstractContextManager[None]:
    """Report stand-ins from ``tensor.device``, for layers that run again in a backward pass."""
    return registries[-1].answering() if registries else nullcontext()


def observed() -> bool:
    """Return whether ``logical_devices`` checks the operations of this thread."""
    return _observed.now
