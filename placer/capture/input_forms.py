"""The forms in which users give a model's inputs, and their conversion to call arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from placer.errors import InputError, kind_of


def call_arguments(inputs: Any, name: str = "inputs") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments for the model.

    Args:
        inputs: one argument; a tuple of positional arguments (a named tuple is one argument); or a
            mapping of keyword arguments, such as a tokenizer's ``BatchEncoding``.
        name: of the inputs, for messages.

    Raises:
        InputError: ``inputs`` is None, or a mapping with keys that are not strings.
    """
    if inputs is None:
        raise InputError(
            f"{name} is None; give a tensor, a tuple of arguments, or a dict of keyword arguments"
        )
    if isinstance(inputs, Mapping):
        wrong = [key for key in inputs if not isinstance(key, str)]
        if wrong:
            raise InputError(
                f"{name} has the key {wrong[0]!r}, which is not a string; "
                "put a dict that is itself an argument into a tuple: (inputs,)"
            )
        return (), dict(inputs)
    if isinstance(inputs, tuple) and not hasattr(inputs, "_fields"):
        return inputs, {}
    return (inputs,), {}


def carried_inputs(model: nn.Module, function: str) -> Any:
    """Return the example inputs that a model carries as an attribute.

    Args:
        model: the model.
        function: the name of the function that takes the inputs, for the message.

    Raises:
        InputError: it carries none.
    """
    for name in ("example_input_array", "dummy_inputs"):
        try:
            carried = getattr(model, name, None)
        except Exception:
            # transformers computes dummy_inputs, which fails for some models.
            continue
        if carried is not None and not callable(carried):
            return carried
    raise InputError(
        f"{type(model).__name__} carries no example inputs (example_input_array or dummy_inputs):"
        f" pass one micro-batch, {function}(model, x), {function}(model, (x, y)) or"
        f" {function}(model, {{'input_ids': x}})"
    )


def require_tensors(inputs: Any, leaves: Sequence[Any], name: str = "inputs") -> None:
    """Raise an InputError if inputs contain no tensor.

    Args:
        inputs: the inputs.
        leaves: the same, flattened.
        name: of the inputs, for the message.

    Raises:
        InputError: they contain no tensor, but numpy arrays for example.
    """
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise InputError(
            f"{name}, {kind_of(inputs)}, contain no tensor; convert arrays by torch.as_tensor(x)"
        )


def refuse_nested(leaves: Sequence[Any]) -> None:
    """Raise an InputError if a tensor is nested without being jagged.

    It has no sizes, which the batch dimension is found by.

    Args:
        leaves: flattened inputs or target.

    Raises:
        InputError: one is.
    """
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_nested and leaf.layout == torch.strided:
            raise InputError(
                "a nested tensor has the layout torch.strided; give torch.jagged, or a padded "
                "tensor: x.to_padded_tensor(0.0)"
            )


def input_advice(error: BaseException, args: tuple[Any, ...] = ()) -> str:
    """Return advice for a model that rejects the form of its inputs; empty for other errors.

    Args:
        error: the model's exception.
        args: the positional arguments.
    """
    if not isinstance(error, TypeError | AttributeError):
        return ""
    if "unexpected keyword argument" in str(error):
        return (
            "; a dict gives keyword arguments: if the model takes a dict itself, give it as "
            "(inputs,)"
        )
    if "numpy.ndarray" in str(error):
        return "; give tensors, not numpy arrays: convert these by torch.as_tensor(x)"
    if "must be Tensor, not list" in str(error) or (len(args) == 1 and isinstance(args[0], list)):
        return "; give a tuple, not a list, of positional arguments"
    if args and all(isinstance(size, int) for size in args):
        return f"; give a tensor, not a shape, such as torch.randn({', '.join(map(str, args))})"
    if "required positional argument" in str(error) or "positional arguments but" in str(error):
        return (
            "; give one input for each argument of forward: several in a tuple (x, y), or by name "
            "in a dict"
        )
    return ""
