"""Example inputs in the three forms that users give them, and a model in the mode that is profiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from placer.errors import InputError
from placer.graph.structure import flatten


def split(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for the model.

    Args:
        example_inputs: one argument; a tuple of positional arguments; or a mapping of keyword arguments.

    Raises:
        InputError: None, or a mapping whose keys are no names.
    """
    if example_inputs is None:
        raise InputError("example_inputs is None; give a tensor, a tuple of arguments, or a dict of keyword arguments")
    if isinstance(example_inputs, Mapping):
        wrong = [key for key in example_inputs if not isinstance(key, str)]
        if wrong:
            raise InputError(
                f"example_inputs has the key {wrong[0]!r}, which is no keyword; "
                "put a dict that is itself an argument into a tuple: (inputs,)"
            )
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple) and not hasattr(example_inputs, "_fields"):
        return example_inputs, {}
    return (example_inputs,), {}


def trackable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The arguments, and their tensors in order; those made in inference mode, which autograd refuses, are copied."""
    tensors, structure = flatten((args, kwargs))
    tensors = [item.clone() if isinstance(item, Tensor) and item.is_inference() else item for item in tensors]
    return structure.unflatten(tensors), tensors


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put the model in training or evaluation mode, unless its root is in it; every module gets its own mode back.

    A model in training mode whose frozen parts are in evaluation mode is left as it is.
    """
    before = {module: module.training for module in model.modules()}
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, was in before.items():
            module.training = was
