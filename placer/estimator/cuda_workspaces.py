"""Workspaces that CUDA's libraries take in addition to the storages of tensors.

    forward      ┌ workspace ┐      cuDNN computes on tensor cores in the channels-last layout.
                 │           │      Tensors of another layout are copied first, and the result
    input, result┴───────────┴──    is copied back.

Flash attention sums the query's gradient in float32. With fewer key heads than query heads, it
makes the gradients of keys and values for each query head first.

What cuDNN's other algorithms take is not known without a GPU and is left out, and so are cuBLAS's
workspaces, which are part of a device's reserve. While a mode is active, autograd adds further
gradients of a value out of place. So the backward workspace of a layer that reads a value several
times counts one gradient more than CUDA takes.

Source: NVIDIA, "Convolutional Layers User's Guide", "Tensor Layouts In Memory": kernels for NCHW
transpose their operands to NHWC. Which convolutions of float32 do so is known from the peaks in
``benchmarks/results/profiler-1xH200.json``. PyTorch, ``mha_bwd`` in
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placer import devices
from placer.capture.export.nested_ops import run_under_mode

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_FLOAT_BYTES = 4
# Flash attention computes on blocks of this many queries and this part of a head.
_QUERIES, _HEAD_PART = 128, 32


class CudaWorkspaces(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that creates and frees a tensor as large as an operation's workspace.

    A storage log that was entered before counts these tensors.

    Attributes:
        weight_pass_bytes: the largest peak of a convolution's weight-gradient computation so far,
            with its results.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weight_pass_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(devices.dispatches, types)):
            # the subclass decomposes the operation; the mode sees the operations inside
            return NotImplemented
        if isinstance(func, torch._ops.HigherOrderOperator):
            return run_under_mode(self, func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if func is _aten.convolution.default:
            _take(_forward_bytes(result, *args))
        elif func is _aten.convolution_backward.default:
            _take(_backward_bytes(result, *args))
            made_bytes = sum(each.nbytes for each in result[1:] if each is not None)
            weight_bytes = _weight_half_bytes(result[1], *args)
            self.weight_pass_bytes = max(self.weight_pass_bytes, made_bytes + weight_bytes)
        elif func is _aten._scaled_dot_product_flash_attention_backward.default:
            _take(_flash_backward_bytes(*args))
        return result


def _take(size_bytes: int) -> None:
    """Create and free a tensor."""
    if size_bytes > 0:
        torch.empty(size_bytes, dtype=torch.uint8)


def _forward_bytes(result: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    groups = rest[-1]
    return _copies_bytes(x, weight, groups, (x, weight, result))


def _backward_bytes(results: Any, gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    """Return the peak of both halves beyond the results, which exist at the end."""
    of_x, of_weight = results[:2]
    input_bytes = _copies_bytes(x, weight, rest[-2], (gradient, weight, of_x))
    weight_bytes = _weight_half_bytes(of_weight, gradient, x, weight, *rest)
    # the gradient of the weight does not exist yet while the input's is computed
    later = of_weight.nbytes if isinstance(of_weight, Tensor) else 0
    return max(input_bytes - later, weight_bytes)


def _weight_half_bytes(
    of_weight: Tensor | None, gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any
) -> int:
    return _copies_bytes(x, weight, rest[-2], (gradient, x, of_weight))


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


def _flash_backward_bytes(gradient: Tensor, query: Tensor, key: Tensor, *rest: Any) -> int:
    """Return the float32 sums of the query's gradient, and expanded gradients of key and value."""
    batch, heads, length, size = query.shape
    rows = batch * heads * _rounded(length, _QUERIES)
    sums_bytes = rows * (_rounded(size, _HEAD_PART) + 1) * _FLOAT_BYTES
    expanded_bytes = 0 if key.shape[1] == heads else 2 * key.nbytes // key.shape[1] * heads
    return sums_bytes + expanded_bytes


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit
