"""The operations that CUDA selects, run on fake tensors of the CPU.

Some operations of torch only decide which kernel runs, and decide by the device. A fake tensor of
``cuda`` needs a build of torch with CUDA, so layers run on fake tensors of the CPU, and this mode
takes the decisions for them:

    dropout     ──▶ native_dropout: the mask has one byte per element
    rms_norm    ──▶ one fused kernel, which saves its input and a number per row
    attention   ──▶ flash (half precision), memory-efficient (float32 and masks) or math

Source: PyTorch 2.11, aten/src/ATen/native/Dropout.cpp (``is_fused_kernel_acceptable``),
layer_norm.cpp (``rms_norm_symint``) and transformers/cuda/sdp_utils.cpp (``select_sdp_backend``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten

FLASH, EFFICIENT, MATH = "flash", "efficient", "math"
"""The backends of attention. On Hopper, cuDNN's replaces flash; it saves tensors of equal sizes."""

_HALF = (torch.float16, torch.bfloat16)
# Largest head of the flash kernels.
_FLASH_HEAD = 256
# Flash kernels need heads whose size is a multiple of 8; torch pads the others.
_FLASH_UNIT = 8
# Tensor cores read 16 bytes at a time, so heads of the memory-efficient kernel have whole units.
_UNIT_BYTES = 16


class CudaOperations(TorchFunctionMode):
    """A mode that runs operations as CUDA would select them, on GPUs since Ampere.

    Arguments of replacements have torch's names, because captured graphs pass some by keyword.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None:
            result = replacement(*args, **kwargs)
            if result is not None:
                return result
        return func(*args, **kwargs)


def attention_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> str:
    """Return the backend of scaled dot product attention on a GPU since Ampere.

    Args:
        query: of shape (..., query heads, query length, head size).
        key: of shape (..., key heads, key length, head size).
        value: of shape (..., key heads, key length, value size).
        mask: added to the scores or, if boolean, selects them; None for none.
        is_causal: whether later positions are masked.
    """
    if query.dim() != 4 or 0 in (query.shape[-2], key.shape[-2]):
        return MATH
    size, of_value = query.shape[-1], value.shape[-1]
    dense = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    # For unlike lengths, torch aligns the causal mask with the first position, and flash attention
    # with the last one.
    square = not is_causal or query.shape[-2] == key.shape[-2]
    if (
        query.dtype in _HALF
        and dense
        and square
        and mask is None
        and size == of_value <= _FLASH_HEAD
    ):
        return FLASH
    unit = _UNIT_BYTES // query.element_size()
    same_heads = query.shape[-3] == key.shape[-3] == value.shape[-3]
    fits = size % unit == of_value % unit == 0
    if query.dtype in (*_HALF, torch.float32) and dense and fits and same_heads:
        return EFFICIENT
    return MATH


def _dropout(input: Tensor, p: float, train: bool = True) -> Tensor | None:
    if not train or not 0 < p < 1 or not input.numel():
        return None
    dropped: Tensor = _aten.native_dropout.default(input, p, True)[0]
    return dropped


def _functional_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    return None if inplace else _dropout(input, p, training)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    backend = attention_backend(query, key, value, attn_mask, is_causal)
    if backend == FLASH:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    wanted: Tensor
    if backend == EFFICIENT:
        needs_grad = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (query, key, value)
        )
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        wanted = _aten._scaled_dot_product_efficient_attention.default(
            query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
        )[0]
        return wanted
    wanted = _aten._scaled_dot_product_attention_math.default(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        None,
        scale=scale,
        enable_gqa=enable_gqa,
    )[0]
    return wanted


def _flash(
    query: Tensor, key: Tensor, value: Tensor, p: float, is_causal: bool, scale: float | None
) -> Tensor:
    size = query.shape[-1]
    rest = -size % _FLASH_UNIT
    if rest:
        query, key, value = (functional.pad(tensor, (0, rest)) for tensor in (query, key, value))
    wanted: Tensor = _aten._scaled_dot_product_flash_attention.default(
        query, key, value, p, is_causal, False, scale=scale or 1 / math.sqrt(size)
    )[0]
    return wanted[..., :size] if rest else wanted


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask in the query's dtype, as numbers to add to the scores."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -math.inf).to(query.dtype)
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor | None:
    if input.is_complex() or (weight is not None and weight.dtype != input.dtype):
        return None
    normed: Tensor = _RMSNorm.apply(input, len(normalized_shape), weight)  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    """The memory of the fused kernel: one pass, and one reciprocal per row in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: int, weight: Tensor | None) -> Tensor:
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = (*x.shape[: x.dim() - dims], *[1] * dims)
        ctx.save_for_backward(x, x.new_empty(rows, dtype=torch.float32), weight)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, _, weight = ctx.saved_tensors
        of_x, _, of_weight = ctx.needs_input_grad
        return (
            torch.empty_like(x) if of_x else None,
            None,
            torch.empty_like(weight) if of_weight and weight is not None else None,
        )


def _histogram(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor | None:
    # CUDA counts whole numbers, too, which the CPU refuses; mixtures of experts count their tokens
    return None if input.is_floating_point() else input.new_empty(bins)


_REPLACEMENTS: dict[Any, Callable[..., Tensor | None]] = {
    _aten.dropout.default: _dropout,
    torch.dropout: _dropout,
    functional.dropout: _functional_dropout,
    _aten.scaled_dot_product_attention.default: _attention,
    functional.scaled_dot_product_attention: _attention,
    _aten.rms_norm.default: _rms_norm,
    torch.rms_norm: _rms_norm,
    functional.rms_norm: _rms_norm,
    _aten.histc.default: _histogram,
    torch.histc: _histogram,
}
