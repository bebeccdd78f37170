"""Operators that a received graph may call: tensor arithmetic without access to memory or files.

Excluded on purpose: operators that read files (``from_file``), alias memory (``as_strided``,
``set_``, ``resize_``) or skip checks (``_unsafe_index``); custom operators; and backward operators,
which autograd calls itself.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from placer.capture.serialization import NUMBER_FUNCTIONS
from placer.errors import InputError

MAX_NUMBER = 2**63

ELEMENTWISE = """
    __and__ __ilshift__ __irshift__ __ixor__ __iand__ __ior__ __lshift__ __or__ __rshift__ __xor__
    abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bernoulli bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp
    clamp_max clamp_min clip conj conj_physical copysign cos cosh deg2rad digamma div divide elu eq
    erf erfc erfinv exp exp2 expm1 fill float_power floor floor_divide fmax fmin fmod frac ge gelu
    glu greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0
    isfinite isinf isnan isneginf isposinf ldexp le leaky_relu lerp less less_equal lgamma log log10
    log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit
    lt masked_fill maximum minimum mish mul multiply nan_to_num ne neg negative nextafter not_equal
    positive pow prelu rad2deg reciprocal relu relu6 remainder round rrelu rsqrt rsub selu sgn
    sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square sub subtract tan tanh
    threshold true_divide trunc where xlogy zero copy
"""
REDUCTIONS = """
    all amax amin aminmax any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum diff
    equal kthvalue linalg_norm linalg_vector_norm log_softmax logcumsumexp logsumexp max mean median
    min mode msort nanmean nansum norm prod softmax sort std std_mean sum topk trace var var_mean
"""
SHAPES = """
    alias atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors broadcast_to cat
    channel_shuffle chunk clone column_stack concat concatenate constant_pad_nd contiguous detach
    diag diag_embed diagonal dropout dsplit dstack expand expand_as feature_dropout alpha_dropout
    flatten flip fliplr flipud gather hsplit hstack index index_add index_copy index_fill index_put
    index_select lift_fresh lift_fresh_copy masked_scatter masked_select meshgrid moveaxis movedim
    mT mH narrow nonzero numpy_T one_hot pad permute pixel_shuffle pixel_unshuffle ravel
    reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d
    replication_pad2d replication_pad3d reshape reshape_as roll rot90 scatter scatter_add
    scatter_reduce select select_scatter slice slice_scatter split split_with_sizes squeeze stack
    swapaxes swapdims t take take_along_dim tensor_split tile to _to_copy transpose tril triu
    tril_indices triu_indices type_as unbind unflatten unfold unsqueeze view view_as view_as_complex
    view_as_real vsplit vstack bucketize col2im im2col imag real searchsorted
"""
MAKERS = """
    arange bernoulli empty empty_like exponential eye full full_like hann_window linspace logspace
    multinomial new_empty new_full new_ones new_zeros normal ones ones_like rand rand_like randint
    randint_like randn randn_like random randperm scalar_tensor uniform zeros zeros_like
"""
NETWORKS = """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _native_batch_norm_legit
    _native_batch_norm_legit_no_training adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d addbmm addmm addmv addr
    affine_grid_generator avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm bilinear
    binary_cross_entropy binary_cross_entropy_with_logits bmm cdist convolution conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d cosine_similarity cross_entropy_loss dot
    einsum embedding fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_irfft fft_irfft2 fft_rfft
    fft_rfft2 fft_fftshift fft_ifftshift grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru
    gru_cell huber_loss inner instance_norm kl_div kron l1_loss layer_norm linalg_cross
    linalg_matmul linear lstm lstm_cell matmul max_pool1d max_pool2d max_pool2d_with_indices
    max_pool3d mm mse_loss mv native_batch_norm native_dropout native_group_norm native_layer_norm
    nll_loss nll_loss2d nll_loss_nd outer rms_norm rnn_relu rnn_tanh scaled_dot_product_attention
    smooth_l1_loss stft istft tensordot upsample_bicubic2d upsample_bilinear2d upsample_linear1d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
"""
NUMBERS = """
    _assert_async _assert_scalar _assert_tensor_metadata _local_scalar_dense item is_nonzero
    sym_constrain_range sym_constrain_range_for_size sym_numel sym_size sym_stride
"""
ALLOWED = frozenset(" ".join((ELEMENTWISE, REDUCTIONS, SHAPES, MAKERS, NETWORKS, NUMBERS)).split())
"""Names of allowed ATen operators; the in-place form is allowed too, ``out`` is not."""


def find(name: str) -> Callable[..., Any]:
    """Return the function that an operation calls.

    Args:
        name: ``aten.operator.overload``, or ``number.function``.

    Raises:
        InputError: if it is not allowed, or this version of torch does not have it.
    """
    namespace, _, rest = name.partition(".")
    if namespace == "number" and rest in NUMBER_FUNCTIONS:
        return _bounded(NUMBER_FUNCTIONS[rest])
    base, _, overload = rest.partition(".")
    if namespace != "aten" or (base not in ALLOWED and base.removesuffix("_") not in ALLOWED):
        close = get_close_matches(base[:80], ALLOWED, 1)
        hint = f"; did you mean aten.{close[0]}?" if close else ""
        raise InputError(
            f"operator {name[:100]!r} is not among those that a graph from elsewhere may call{hint}"
        )
    packet = getattr(torch.ops.aten, base, None)
    if packet is None or overload not in packet.overloads():
        raise InputError(
            f"torch {torch.__version__} has no operator {name[:100]!r}; versions here and there "
            "differ"
        )
    operator = getattr(packet, overload)
    schema = operator._schema
    if not any("Tensor" in str(one.type) for one in (*schema.arguments, *schema.returns)):
        raise InputError(
            f"operator {name[:100]!r} works on no tensors, which a graph from elsewhere does by "
            "numbers"
        )
    # an ``out`` argument could write outside the layer's own results
    if any(argument.is_out for argument in schema.arguments):
        raise InputError(
            f"operator {name[:100]!r} writes to an out argument, which a graph from elsewhere may "
            "not"
        )
    found: Callable[..., Any] = operator
    return found


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of numbers with limits, so that no result grows without bound.

    Lists are accepted only by ``getitem``.
    """

    def call(*arguments: Any) -> Any:
        for argument in arguments[1:] if function is NUMBER_FUNCTIONS["getitem"] else arguments:
            if not isinstance(argument, int | float | Tensor):
                raise InputError(
                    f"{function.__name__} takes numbers, not {type(argument).__name__}"
                )
        if function is NUMBER_FUNCTIONS["getitem"] and not isinstance(arguments[0], list | tuple):
            raise InputError(
                f"getitem takes an item of a list, not of {type(arguments[0]).__name__}"
            )
        result = function(*arguments)
        if isinstance(result, int | float) and abs(result) > MAX_NUMBER:
            raise InputError(f"{function.__name__} makes a number above 2 ** 63")
        return result

    return call
