"""The three forms in which users give a model's inputs, and the one in which it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from placer.errors import InputError, kind_of


def split(inputs: Any, name: str = "inputs") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for the model.

    Args:
        inputs: one argument; a tuple of positional arguments (a named tuple is one argument); or a
            mapping of keyword arguments, such as the ``BatchEncoding`` of a tokenizer.
        name: of the inputs, for messages.

    Raises:
        InputError: None, or a mapping whose keys are no names.
    """
    if inputs is None:
        raise InputError(
            f"{name} is None; give a tensor, a tuple of arguments, or a dict of keyword arguments"
        )
    if isinstance(inputs, Mapping):
        wrong = [key for key in inputs if not isinstance(key, str)]
        if wrong:
            raise InputError(
                f"{name} has the key {wrong[0]!r}, which is no keyword; "
                "put a dict that is itself an argument into a tuple: (inputs,)"
            )
        return (), dict(inputs)
    if isinstance(inputs, tuple) and not hasattr(inputs, "_fields"):
        return inputs, {}
    return (inputs,), {}


def refuse_no_tensor(inputs: Any, leaves: Sequence[Any], name: str = "inputs") -> None:
    """Refuse inputs that hold no tensor, numpy arrays say.

    Args:
        inputs: as they were given.
        leaves: the same, flattened.
        name: of the inputs, for the message.

    Raises:
        InputError: they hold none.
    """
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise InputError(
            f"{name}, {kind_of(inputs)}, hold no tensor; give tensors, as torch.as_tensor(x) is"
        )


def advice(error: BaseException, args: tuple[Any, ...] = ()) -> str:
    """What helps where a model refuses the form in which its inputs were given; empty for other
    errors.

    Args:
        error: what the model raised.
        args: the positional arguments.
    """
    if not isinstance(error, TypeError | AttributeError):
        return ""
    if "unexpected keyword argument" in str(error):
        return "; a dict is one of keyword arguments: where the model takes a dict itself, give it as (inputs,)"
    if "numpy.ndarray" in str(error):
        return "; give tensors, not numpy arrays, as torch.as_tensor(x) is"
    if "must be Tensor, not list" in str(error) or (len(args) == 1 and isinstance(args[0], list)):
        return "; give a tuple, not a list, of positional arguments"
    if args and all(isinstance(size, int) for size in args):
        return f"; give a tensor, not a shape, such as torch.randn({', '.join(map(str, args))})"
    return ""
