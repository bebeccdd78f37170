"""A loss function: what it is, what it must give, and the target that it compares a result with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor
from torch.utils._pytree import tree_leaves

from placer.errors import InputError, kind_of

LossFunction = Callable[[Any, Any], Any]
"""``loss_fn(output, target)``: one number, or a number and a dict of further values, ``(loss,
{"accuracy": ...})``."""


def loss_and_values(made: Any) -> tuple[Any, dict[str, Any]]:
    """Return the loss, and the further values by name, from what a loss function gave.

    Raises:
        InputError: it gave a tuple of something else, or a value that is a float: a step that is
            recorded once would return the number of the recording ever after.
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
                    f"loss_fn gave the value {name!r} as a Python number, which later steps would repeat, because "
                    "passes are recorded once; give it as a tensor, without .item() or float()"
                )
        return made[0], dict(made[1])
    raise InputError(
        f"loss_fn gave a tuple of {len(made)}; let it give the loss, or the loss and a dict of values by name: "
        '(loss, {"accuracy": accuracy})'
    )


def refuse_no_number(loss: Any) -> None:
    """Refuse what a loss function gave that cannot be made small.

    Raises:
        InputError: it is no number, or a complex one.
    """
    if not isinstance(loss, Tensor) or loss.dim():
        number = f"{loss!r}" if isinstance(loss, int | float) else kind_of(loss)
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else number
        raise InputError(
            f"loss_fn gave {given}; let it give one number, such as the mean over samples"
        )
    if loss.is_complex():
        raise InputError(
            f"loss_fn gave a number of type {loss.dtype}, which cannot be made small; give its real part"
        )


def refuse_untrained(loss: Tensor) -> None:
    """Refuse a loss that nothing can be learnt from, where gradients are asked for.

    Raises:
        InputError: no gradient comes from it.
    """
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise InputError(
            "loss_fn gave a number that no gradient comes from: no parameter that requires a gradient has a part in "
            "it, so there is nothing to train"
        )


def refuse_arrays(target: Any) -> None:
    """Refuse a target that has numpy arrays: every micro-batch would be given the whole of them.

    Raises:
        InputError: it has.
    """
    for leaf in tree_leaves(target):
        if isinstance(leaf, ndarray):
            raise InputError(
                f"the target has a numpy array of shape {leaf.shape}; give tensors, as torch.as_tensor(x) is"
            )


__all__ = [
    "LossFunction",
    "loss_and_values",
    "refuse_arrays",
    "refuse_no_number",
    "refuse_untrained",
]
