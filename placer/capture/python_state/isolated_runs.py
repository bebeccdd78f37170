"""Trial runs of a model that leave no trace.

They find out what a model does, or compare two ways to run it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.export import checkpoints
from placer.capture.python_state import host_rng
from placer.capture.python_state.module_side_effects import restored_modules
from placer.capture.python_state.tensor_writes import restored_tensors


@contextmanager
def isolated_run(model: nn.Module) -> Iterator[None]:
    """Restore tensors, attributes and random number generators after the code inside.

    The tensors are parameters, buffers and plain tensors. Hooks of the caller on saved tensors,
    such as a checkpoint's, do not see the run.

    Args:
        model: the model that runs inside.
    """
    # Buffers are copied in advance: a training run writes to most of them. Parameters are copied
    # only when something writes to them, because they are large.
    buffers = BufferValues(model)
    held = [*buffers.tensors, *model.parameters()]
    places = {tensor.device.index or 0 for tensor in held if tensor.device.type == "cuda"}
    drawn = torch.random.fork_rng(sorted(places))
    with (
        restored_modules(model) as left,
        host_rng.restored_generators(),
        drawn,
        checkpoints.without_saved_tensor_hooks(),
    ):
        try:
            with restored_tensors([*model.parameters(), *left.plain_tensors()]):
                yield
        finally:
            buffers.restore()


class BufferValues:
    """Copies of a model's buffers.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = {
            part: part.clone() for buffer in model.buffers() for part in devices.own_parts(buffer)
        }

    @property
    def tensors(self) -> list[Tensor]:
        """Return the buffers, or the tensors that they consist of."""
        return list(self._kept)

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copied values back into the buffers."""
        for buffer, value in self._kept.items():
            buffer.copy_(value)
