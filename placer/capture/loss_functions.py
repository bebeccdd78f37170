"""Loss functions: their type, and checks of their results and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor
from torch.utils._pytree import tree_leaves

from placer.errors import InputError, kind_of

LossFunction = Callable[[Any, Any], Any]
"""``loss_fn(output, target)`` returns the loss, or the loss and a dict of further values."""


def loss_and_values(made: Any) -> tuple[Any, dict[str, Any]]:
    """Return the loss and the further values, by name, from a loss function's result.

    Args:
        made: the result.

    Raises:
        InputError: the result is another tuple, or a value is a float. A step is recorded once, so
            later steps would repeat the number of the recording.
    """
    if not isinstance(made, tuple):
        return made, {}
    if (
        len(made) == 2
        and isinstance(made[1], Mapping)
        and all(isinstance(name, str) for name in made[1])
    ):
        for name, value in made[1].items():
            if any(isinstance(leaf, float) for leaf in tree_leaves(value)):
                raise InputError(
                    f"loss_fn returned the value {name!r} as a Python number, which later steps "
                    "would repeat, because passes are recorded once; return it as a tensor, "
                    "without .item() or float()"
                )
        return made[0], dict(made[1])
    raise InputError(
        f"loss_fn returned a tuple of {len(made)}; return the loss, or the loss and a dict of "
        'values by name: (loss, {"accuracy": accuracy})'
    )


def require_real_number(loss: Any) -> None:
    """Raise an InputError if a loss cannot be minimised.

    Args:
        loss: the loss.

    Raises:
        InputError: it is not one real number in a tensor.
    """
    if not isinstance(loss, Tensor) or loss.dim():
        number = f"{loss!r}" if isinstance(loss, int | float) else kind_of(loss)
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else number
        raise InputError(
            f"loss_fn returned {given}; return one number, such as the mean over samples"
        )
    if loss.is_complex():
        raise InputError(
            f"loss_fn returned a number of type {loss.dtype}, which cannot be minimised; return "
            "its real part"
        )


def require_gradient(loss: Tensor) -> None:
    """Raise an InputError if gradients are enabled and none flows from the loss.

    Args:
        loss: the loss.

    Raises:
        InputError: it requires no gradient.
    """
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise InputError(
            "loss_fn returned a loss without a gradient: it depends on no parameter that requires "
            "a gradient, so there is nothing to train; call requires_grad_() on what is to be "
            "trained"
        )


def refuse_arrays(target: Any) -> None:
    """Raise an InputError if a target contains numpy arrays.

    Every micro-batch would receive the whole array.

    Args:
        target: the target.

    Raises:
        InputError: it contains one.
    """
    for leaf in tree_leaves(target):
        if isinstance(leaf, ndarray):
            raise InputError(
                f"the target has a numpy array of shape {leaf.shape}; convert it by "
                "torch.as_tensor(x)"
            )


__all__ = [
    "LossFunction",
    "loss_and_values",
    "refuse_arrays",
    "require_gradient",
    "require_real_number",
]
