"""Runs of a model beside its real ones, which leave no trace: to see what it does, or to compare
two ways to run it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.export import checkpoints
from placer.capture.python_state import host_rng
from placer.capture.python_state.module_side_effects import put_back
from placer.capture.python_state.tensor_writes import written_back


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Give parameters, buffers, plain tensors, attributes, and random number generators their
    values back afterwards.

    Hooks of the caller on what autograd saves, such as a checkpoint's, see nothing of what runs
    inside.

    Args:
        model: the model that runs inside.
    """
    buffers = BufferValues(model)
    held = [*buffers.tensors, *model.parameters()]
    places = {tensor.device.index or 0 for tensor in held if tensor.device.type == "cuda"}
    drawn = torch.random.fork_rng(sorted(places))
    with put_back(model) as left, host_rng.given_back(), drawn, checkpoints.unseen_by_hooks():
        try:
            with written_back([*model.parameters(), *left.plain_tensors()]):
                yield
        finally:
            buffers.put_back()


class BufferValues:
    """The values of a model's buffers.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = {
            part: part.clone() for buffer in model.buffers() for part in devices.own_parts(buffer)
        }

    @property
    def tensors(self) -> list[Tensor]:
        """The buffers, or what they consist of."""
        return list(self._kept)

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the buffers these values again."""
        for buffer, value in self._kept.items():
            buffer.copy_(value)
