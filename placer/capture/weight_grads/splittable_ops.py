"""The operations whose weight gradients can be computed apart from the gradients of what they read.

Zero-bubble schedules do that half later; until then each of these operations keeps the gradient of
its result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten

LINEAR = _aten.linear.default
CONVOLUTIONS = {_aten.conv1d.default: 1, _aten.conv2d.default: 2, _aten.conv3d.default: 3}
"""With the dimensions of each."""


def can_wait(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of an operation has weights whose gradients can wait.

    Args:
        func: the operation.
        args: its positional arguments.
        kwargs: those given by name.
    """
    if (func is not LINEAR and func not in CONVOLUTIONS) or kwargs or not torch.is_grad_enabled():
        return False
    if args[0].dtype != args[1].dtype and not torch.is_autocast_enabled(args[0].device.type):
        return False  # the operation itself refuses them
    if args[0].is_complex() or args[1].is_complex():
        # their gradients are conjugates, and convolutions of them have no backward pass of their
        # own
        return False
    if torch._C._functorch.get_dynamic_layer_stack_depth():
        return False  # inside torch.func a call stands for many
    bias = args[2] if len(args) > 2 else None
    return _is_weight(args[1]) and (bias is None or not bias.requires_grad or _is_weight(bias))


def _is_weight(tensor: Any) -> bool:
    """Whether a gradient can be added to the tensor's at any time: it is there already."""
    return (
        isinstance(tensor, Tensor)
        and tensor.is_leaf
        and tensor.requires_grad
        and tensor.grad is not None
    )
