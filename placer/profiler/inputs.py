"""Example inputs in the three forms that users give them, and a model in the mode that is profiled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from placer.errors import InputError
from placer.graph import arguments
from placer.graph.batch import batch_size
from placer.graph.structure import Structure, flatten_inputs


def split(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for the model; see ``placer.graph.arguments``."""
    return arguments.split(example_inputs, "example_inputs")


def trackable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Structure]:
    """The arguments' tensors in order, and what rebuilds positional and keyword arguments from them.

    Tensors made in inference mode, which autograd refuses, are copied.

    Raises:
        InputError: the batch is empty.
    """
    tensors, structure = flatten_inputs(args, kwargs)
    if batch_size(tensors) < 1:
        raise InputError("the example inputs are a batch of 0, so there is nothing to measure; give at least 1 sample")
    return [_trackable(item) for item in tensors], structure


def resized(tensors: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """Inputs of other batch sizes, the smallest first: those whose first dimension is the batch, repeated or cut.

    Args:
        tensors: the flattened inputs.
        sizes: samples in each batch.

    Raises:
        InputError: there is no size, or one is below 1 or listed twice, or the inputs have no batch dimension.
    """
    wanted = _in_order(tensors, sizes)
    batch = batch_size(tensors)
    return [[_resized(tensor, batch, size) for tensor in tensors] for size in wanted]


def sizes(example_inputs: Any, batch_sizes: Sequence[int] | None) -> list[int]:
    """Samples in each micro-batch that will be measured, the smallest first.

    Args:
        example_inputs: of one micro-batch.
        batch_sizes: as for ``profile``: None for the example's own.

    Raises:
        InputError: as ``split``, ``trackable`` and ``resized`` do.
    """
    tensors, _ = trackable(*split(example_inputs))
    return [batch_size(tensors)] if batch_sizes is None else _in_order(tensors, batch_sizes)


def _in_order(tensors: Sequence[Any], sizes: Sequence[int]) -> list[int]:
    """Sizes that inputs can have, the smallest first."""
    wanted = list(sizes) if isinstance(sizes, Iterable) else []
    if (
        not wanted
        or any(not isinstance(size, Integral) or size < 1 for size in wanted)
        or len(set(wanted)) < len(wanted)
    ):
        raise InputError(f"batch_sizes={sizes!r}: give different whole numbers of samples, such as (8, 16)")
    if not any(isinstance(tensor, Tensor) and tensor.dim() for tensor in tensors):
        raise InputError("the example inputs have no dimension that could be the batch, so batch_sizes has no meaning")
    return sorted(wanted)


def _resized(tensor: Any, batch: int, size: int) -> Any:
    if not isinstance(tensor, Tensor) or not tensor.dim() or tensor.shape[0] != batch or size == batch:
        return tensor
    return torch.cat([tensor] * -(-size // batch))[:size].clone()


def _trackable(item: Any) -> Any:
    return item.clone() if isinstance(item, Tensor) and item.is_inference() else item


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
