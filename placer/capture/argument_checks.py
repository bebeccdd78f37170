"""Checks of the objects that users pass besides inputs: model, loss, optimizer and options.

Each raises an error that names the argument before anything runs.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from placer.errors import InputError, kind_of
from placer.utils.option_checks import require_count


def require_module(model: Any, wanted: str = "an nn.Module") -> None:
    """Raise an InputError if ``model`` is not an nn.Module.

    Args:
        model: the user's argument.
        wanted: what to give instead, for the message.

    Raises:
        InputError: it is not a module, or it is a class.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InputError(
            f"model is the class {model.__name__}; give an instance, such as {model.__name__}()"
        )
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {kind_of(model)}; give {wanted}")


def require_loss_function(loss_fn: Any) -> None:
    """Raise an InputError if ``loss_fn`` is not a loss function without parameters.

    Raises:
        InputError: it is not callable, is a class, or has a parameter, which no step would train.
    """
    if isinstance(loss_fn, type):
        raise InputError(
            f"loss_fn is the class {loss_fn.__name__}; give an instance, such as "
            f"{loss_fn.__name__}()"
        )
    if not callable(loss_fn):
        raise InputError(
            f"loss_fn is {loss_fn!r}; give a function of the model's result and the target"
        )
    own = loss_fn.named_parameters() if isinstance(loss_fn, nn.Module) else ()
    name = next((name for name, parameter in own if parameter.requires_grad), None)
    if name is not None:
        raise InputError(
            f"loss_fn has a parameter of its own, {name!r}, which would not be trained; "
            "move it into the model, and pass the model the parts of the target that it needs"
        )


def require_loss_with_target(loss_fn: Any, target: Any) -> None:
    """Raise an InputError if only one of loss and target is given.

    Raises:
        InputError: one of the two is missing.
    """
    if (loss_fn is None) != (target is None):
        there, missing = ("target", "loss_fn") if loss_fn is None else ("loss_fn", "target")
        raise InputError(
            f"{there} is given without {missing}; give both to measure the loss, or neither"
        )


def optimizer_list(optimizer: Any) -> list[Any]:
    """Return the optimizers of an argument that is one optimizer, a list of them, or None.

    Args:
        optimizer: the user's argument; None gives an empty list.

    Raises:
        InputError: the list is empty, or contains an optimizer twice.
    """
    if not isinstance(optimizer, list | tuple):
        return [] if optimizer is None else [optimizer]
    if not optimizer:
        raise InputError(
            f"optimizer is {optimizer!r}, an empty list; omit it to step the optimizer yourself"
        )
    if len({id(one) for one in optimizer}) < len(optimizer):
        raise InputError(
            "the list of optimizers contains one of them twice, which would step twice; give each "
            "once"
        )
    return list(optimizer)


def refuse_closures(optimizer: Any) -> None:
    """Raise an InputError if an optimizer's ``step`` requires a closure, as LBFGS does.

    Args:
        optimizer: an optimizer or its class.

    Raises:
        InputError: its ``step`` has an argument without a default.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    # Look at the class: a learning-rate scheduler puts a function with another signature on the
    # instance.
    step = inspect.getattr_static(kind, "step", None)
    if not callable(step):
        return
    try:
        # Without self.
        wanted = [*inspect.signature(step).parameters.values()][1:]
    # A function implemented in C has no signature.
    except (TypeError, ValueError):
        return
    needed = next(
        (one for one in wanted if one.default is one.empty and one.kind not in _ANY_NUMBER), None
    )
    if needed is not None:
        raise InputError(
            f"{kind.__name__} evaluates the loss several times a step, through a closure that its "
            f"step() requires ({needed.name!r}); a training step evaluates it once. Give an "
            "optimizer whose step() needs no argument, such as AdamW"
        )


_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
"""The kinds of parameters, ``*args`` and ``**kwargs``, that a caller may omit."""


def require_chunks(chunks: Any) -> None:
    """Raise an InputError if ``chunks`` is not a positive integer.

    Raises:
        InputError: it is not an integer, or is below 1.
    """
    require_count("chunks", chunks, "micro-batches")


def require_samples_for_chunks(chunks: int, samples: int) -> None:
    """Raise an InputError if there are more micro-batches than samples.

    Fewer micro-batches would answer another question than the caller's.

    Raises:
        InputError: ``chunks`` is larger than ``samples``.
    """
    if chunks > samples:
        raise InputError(
            f"chunks={chunks} is more than the samples of the inputs, {samples}; give fewer, or "
            "the inputs of a whole batch"
        )


__all__ = [
    "optimizer_list",
    "refuse_closures",
    "require_chunks",
    "require_loss_function",
    "require_loss_with_target",
    "require_module",
    "require_samples_for_chunks",
]
