"""Operations whose weight gradients can be computed apart from their input gradients.

Zero-bubble schedules defer the weight gradients. Until then, each of these operations keeps its
input and the gradient of its result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten

LINEAR = _aten.linear.default
CONVOLUTIONS = {_aten.conv1d.default: 1, _aten.conv2d.default: 2, _aten.conv3d.default: 3}
"""The convolutions, with their number of dimensions."""


def can_defer(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the weight gradients of a call can be deferred.

    Args:
        func: the operation.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    if (func is not LINEAR and func not in CONVOLUTIONS) or kwargs or not torch.is_grad_enabled():
        return False
    if args[0].dtype != args[1].dtype and not torch.is_autocast_enabled(args[0].device.type):
        # The operation raises torch's own error.
        return False
    if args[0].is_complex() or args[1].is_complex():
        # Complex gradients are conjugates, and ATen has no separate backward pass for complex
        # convolutions.
        return False
    if torch._C._functorch.get_dynamic_layer_stack_depth():
        # Inside torch.func, one call stands for many.
        return False
    bias = args[2] if len(args) > 2 else None
    return _has_gradient(args[1]) and (
        bias is None or not bias.requires_grad or _has_gradient(bias)
    )


def _has_gradient(tensor: Any) -> bool:
    """Return whether a gradient can be added to a tensor's own at any time: it exists already."""
    return (
        isinstance(tensor, Tensor)
        and tensor.is_leaf
        and tensor.requires_grad
        and tensor.grad is not None
    )
