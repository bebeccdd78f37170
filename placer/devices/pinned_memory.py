"""Host memory for weights that a GPU copies again and again: pinned where there are GPUs.

A GPU copies asynchronously only from pinned memory. Torch rounds each pinned allocation up to a
power of two, so tensors are packed into large blocks, whose sizes are powers of two::

    block of 1 GiB    │ up_proj      │ down_proj    │ q_proj │ ... │ unused │
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from placer.devices.routes import HOST
from placer.errors import PlacementError
from placer.utils.units import bytes_text

BLOCK_BYTES = 1 << 30
"""Bytes of a block. A larger tensor has a block of its own."""

ALIGNMENT_BYTES = 512
"""Alignment of tensors in a block, which is also the one of torch's allocators for GPUs."""


def aligned_bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes in a block."""
    size = tensor.numel() * tensor.element_size()
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill the memory between its first and its last."""
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return prod(tensor.shape) in (extent, 0)


def views(memory: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a block, one after another, with the shapes and strides of these tensors.

    Args:
        memory: bytes, shape ``(N,)``; N is at least the sum of the tensors' ``aligned_bytes``.
        tensors: plain; those that are not dense get the strides of contiguous tensors.
    """
    found, offset = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        flat = memory[offset : offset + size].view(tensor.dtype)
        dense = is_dense(tensor)
        found.append(
            flat.as_strided(tensor.shape, tensor.stride()) if dense else flat.view(tensor.shape)
        )
        offset += aligned_bytes(tensor)
    return found


class PinnedBlocks:
    """Blocks of host memory for tensors, which are copied there one after another.

    Args:
        size_bytes: the sum of the tensors' ``aligned_bytes``.
    """

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes
        self._block, self._used = torch.empty(0, dtype=torch.uint8, device=HOST), 0

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in a block.

        Args:
            tensor: plain, on the host.

        Raises:
            PlacementError: the host lacks memory.
        """
        (copied,) = views(self.taken(aligned_bytes(tensor)), [tensor])
        return copied.copy_(tensor)

    def taken(self, size_bytes: int) -> Tensor:
        """Return the next bytes of a block, shape ``(size_bytes,)``.

        Args:
            size_bytes: a multiple of ``ALIGNMENT_BYTES``.

        Raises:
            PlacementError: the host lacks memory.
        """
        if self._used + size_bytes > self._block.numel():
            wanted = max(size_bytes, min(BLOCK_BYTES, _power_of_two(self._left)))
            self._block, self._used = self._made(wanted), 0
        begin = self._used
        self._used, self._left = begin + size_bytes, self._left - size_bytes
        return self._block[begin : self._used]

    def _made(self, size_bytes: int) -> Tensor:
        """Return a block.

        Raises:
            PlacementError: the host lacks memory.
        """
        is_pinned = torch.cuda.is_available()
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, device=HOST, pin_memory=is_pinned)
        except RuntimeError as error:
            raise PlacementError(
                f"the host has no {bytes_text(size_bytes)} of memory more for tensors that rest "
                f"there, of which {bytes_text(self._left)} are left; give a smaller "
                "host_memory_bytes, or keep optimizer state on the devices"
            ) from error


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
