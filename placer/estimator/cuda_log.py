"""A log of storages that counts what CUDA's libraries take in addition.

    forward      ┌ workspace ┐      cuDNN computes on tensor cores in the channels-last layout.
                 │           │      Tensors of another layout are copied first, and the result
    input, result┴───────────┴──    is copied back.

Source: NVIDIA, "Convolutional Layers User's Guide" and "cuDNN Developer Guide", "Tensor Core
Operations": kernels for NCHW transpose their operands to NHWC in the workspace. Which convolutions
of float32 do so is known from the recorded peaks of ``benchmarks/results/profiler-1xH200.json``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from placer.devices.allocator.storage_watch import StorageLog

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


class CudaLog(StorageLog):  # type: ignore[no-untyped-call]
    """A storage log that adds the workspaces of convolutions."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is _aten.convolution.default:
            self._pass(_forward_bytes(result, *args))
        elif func is _aten.convolution_backward.default:
            self._pass(_backward_bytes(result, *args))
        return result

    def _pass(self, size_bytes: int) -> None:
        """Count bytes that an operation takes and gives back."""
        if size_bytes > 0:
            self._changes += [size_bytes, -size_bytes]


def _forward_bytes(result: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    groups = rest[-1]
    return _copies_bytes(x, weight, groups, (x, weight, result))


def _backward_bytes(results: Any, gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    """Return the peak of both halves beyond the results, which exist at the end."""
    groups = rest[-2]
    of_x, of_weight = results[:2]
    input_bytes = _copies_bytes(x, weight, groups, (gradient, weight, of_x))
    weight_bytes = _copies_bytes(x, weight, groups, (gradient, x, of_weight))
    # the gradient of the weight does not exist yet while the input's is computed
    later = of_weight.nbytes if isinstance(of_weight, Tensor) else 0
    return max(input_bytes - later, weight_bytes)


def _copies_bytes(x: Tensor, weight: Tensor, groups: int, operands: tuple[Any, ...]) -> int:
    """Return the bytes of copies in the channels-last layout; 0 if none are needed.

    Args:
        x: the convolution's input.
        weight: its weight.
        groups: its groups.
        operands: what is read and written; None for a gradient that is not needed.
    """
    if any(operand is None for operand in operands):
        return 0
    if x.dtype not in (*_HALF, torch.float32) or groups == x.shape[1] > 1:
        return 0  # kernels without tensor cores
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    if x.dim() in (4, 5) and x.is_contiguous(memory_format=last) and not x.is_contiguous():
        return 0
    if x.dtype == torch.float32 and all(size == 1 for size in weight.shape[2:]):
        return 0  # a product of matrices, which needs no other layout
    return sum(operand.nbytes for operand in tree_leaves(operands))
