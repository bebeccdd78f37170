"""What a user gives beside inputs: a model, a loss, an optimizer. What is none is named before anything runs."""

from __future__ import annotations

from typing import Any

import torch
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
        raise InputError(f"model is the class {model.__name__}; give an instance, such as {model.__name__}()")
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {kind_of(model)}; give {wanted}")


def refuse_no_loss(loss_fn: Any) -> None:
    """Refuse what is no loss function, or one that has parameters, which no step trains.

    Raises:
        InputError: it cannot be called, or is a class whose instances can, or has a parameter.
    """
    if isinstance(loss_fn, type):
        raise InputError(f"loss_fn is the class {loss_fn.__name__}; give an instance, such as {loss_fn.__name__}()")
    if not callable(loss_fn):
        raise InputError(f"loss_fn is {loss_fn!r}; give a function of the model's result and the target")
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
        raise InputError(f"{there} is given without {missing}; give both to have the loss measured, or none")


def refuse_lbfgs(optimizer: type) -> None:
    """Refuse the class of an optimizer that no layers on several devices can have.

    Raises:
        InputError: it is LBFGS, or made of it.
    """
    if issubclass(optimizer, torch.optim.LBFGS):
        raise InputError(
            "LBFGS evaluates the loss several times a step, over all parameters in one vector on one device; "
            "give an optimizer that steps by gradients alone, such as AdamW"
        )


def refuse_no_chunks(chunks: Any) -> None:
    """Refuse what is no number of micro-batches.

    Raises:
        InputError: it is no whole number, or below 1.
    """
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise InputError(f"chunks={chunks!r}: give a whole number of micro-batches, 1 or more")


def refuse_more_chunks(chunks: int, samples: int) -> None:
    """Refuse more micro-batches than there are samples, where fewer would be another question's answer.

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
    "refuse_half_a_loss",
    "refuse_lbfgs",
    "refuse_more_chunks",
    "refuse_no_chunks",
    "refuse_no_flags",
    "refuse_no_loss",
    "refuse_no_module",
]
