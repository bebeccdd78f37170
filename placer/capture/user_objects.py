"""What a user gives beside inputs: a model, a loss, an optimizer. What is none is named before
anything runs.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from placer.errors import InputError, kind_of


def refuse_no_module(model: Any, wanted: str = "an nn.Module") -> None:
    """Refuse what is no model.

    Args:
        model: what was given as such.
        wanted: what to give, for the message.

    Raises:
        InputError: it is no module, or is the class of one.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InputError(
            f"model is the class {model.__name__}; give an instance, such as {model.__name__}()"
        )
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {kind_of(model)}; give {wanted}")


def refuse_no_loss(loss_fn: Any) -> None:
    """Refuse what is no loss function, or one that has parameters, which no step trains.

    Raises:
        InputError: it cannot be called, or is a class whose instances can, or has a parameter.
    """
    if isinstance(loss_fn, type):
        raise InputError(
            f"loss_fn is the class {loss_fn.__name__}; give an instance, such as {loss_fn.__name__}()"
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
            "make it a part of the model, and let the model take what it needs of the target"
        )


def refuse_half_a_loss(loss_fn: Any, target: Any) -> None:
    """Refuse a loss without what it compares with, or the other way round.

    Raises:
        InputError: one of the two is missing.
    """
    if (loss_fn is None) != (target is None):
        there, missing = ("target", "loss_fn") if loss_fn is None else ("loss_fn", "target")
        raise InputError(
            f"{there} is given without {missing}; give both to have the loss measured, or none"
        )


def optimizers_of(optimizer: Any) -> list[Any]:
    """Return the optimizers of an argument that is one optimizer, a list of them, or None.

    Args:
        optimizer: what a user gave; None makes an empty list.

    Raises:
        InputError: the list is empty, or names an optimizer twice.
    """
    if not isinstance(optimizer, list | tuple):
        return [] if optimizer is None else [optimizer]
    if not optimizer:
        raise InputError(
            f"optimizer is {optimizer!r}, an empty list; leave it out to step the optimizer yourself"
        )
    if len({id(one) for one in optimizer}) < len(optimizer):
        raise InputError(
            "the list of optimizers has one of them twice, which would be stepped twice; give each once"
        )
    return list(optimizer)


def refuse_closures(optimizer: Any) -> None:
    """Refuse an optimizer whose ``step`` cannot be called without a closure, as that of LBFGS.

    Args:
        optimizer: an optimizer or the class of one.

    Raises:
        InputError: its ``step`` has an argument without a default.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    # Of the class: a scheduler of learning rates puts a function of another signature on the
    # optimizer itself.
    step = inspect.getattr_static(kind, "step", None)
    if not callable(step):
        return
    try:
        wanted = [*inspect.signature(step).parameters.values()][1:]  # without self
    except (TypeError, ValueError):  # a function of C has no signature
        return
    needed = next(
        (one for one in wanted if one.default is one.empty and one.kind not in _ANY_NUMBER), None
    )
    if needed is not None:
        raise InputError(
            f"{kind.__name__} evaluates the loss several times a step, by a closure that its step() needs "
            f"({needed.name!r}); a training step evaluates it once. Give an optimizer whose step() needs no "
            "argument, such as AdamW"
        )


_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
"""The kinds of parameters, ``*args`` and ``**kwargs``, that may be left out."""


def refuse_no_chunks(chunks: Any) -> None:
    """Refuse what is no number of micro-batches.

    Raises:
        InputError: it is no whole number, or below 1.
    """
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise InputError(f"chunks={chunks!r}: give a whole number of micro-batches, 1 or more")


def refuse_more_chunks(chunks: int, samples: int) -> None:
    """Refuse more micro-batches than there are samples, where fewer would be another question's
    answer.

    Raises:
        InputError: there are more.
    """
    if chunks > samples:
        raise InputError(
            f"chunks={chunks} is more than the samples of the inputs, {samples}; give fewer, or the inputs of a whole "
            "batch"
        )


def refuse_no_flags(**flags: Any) -> None:
    """Refuse what is neither True nor False: a word such as "no" would count as True.

    Raises:
        InputError: one of them, which are given by their names, is something else.
    """
    for name, flag in flags.items():
        if flag not in (True, False):
            raise InputError(f"{name} is {flag!r}; give True or False")


__all__ = [
    "optimizers_of",
    "refuse_closures",
    "refuse_half_a_loss",
    "refuse_more_chunks",
    "refuse_no_chunks",
    "refuse_no_flags",
    "refuse_no_loss",
    "refuse_no_module",
]
