"""Example inputs in their three forms, and the model's mode during profiling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from placer.capture import input_forms
from placer.capture.batch_dims.batch_layout import UNKNOWN_PARAMETERS, BatchLayout, Parameters
from placer.capture.batch_dims.declared_layout import DEFAULT_OPTIONS, call_layout
from placer.capture.pytrees import Structure, flatten_inputs
from placer.errors import InputError
from placer.schema import BatchOptions


def trackable(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: BatchOptions = DEFAULT_OPTIONS,
    parameters: Parameters = UNKNOWN_PARAMETERS,
) -> tuple[list[Any], Structure, BatchLayout]:
    """Return the arguments' leaves, the structure to rebuild them, and their batch layout.

    Tensors created in inference mode, which autograd refuses, are copied.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        options: the declared batch layout.
        parameters: the signature of the model's forward method.

    Raises:
        InputError: if the batch is empty or the options do not fit.
    """
    tensors, structure = flatten_inputs(args, kwargs)
    layout = call_layout((args, kwargs), tensors, structure, options, parameters)
    layout.refuse_misfit()
    if layout.size < 1:
        raise InputError(
            "the example inputs are a batch of 0, so there is nothing to measure; give at least 1 "
            "sample"
        )
    return [_trackable(item) for item in tensors], structure, layout


def resized(
    tensors: Sequence[Any], layout: BatchLayout, sizes: Sequence[int] | None
) -> list[list[Any]]:
    """Return the inputs at other batch sizes, smallest first, repeated or sliced as needed.

    Args:
        tensors: the flattened inputs.
        layout: the batch dimension of each input.
        sizes: numbers of samples; None for the inputs' own.

    Raises:
        InputError: if there is no size, a size is below 1 or listed twice, or the inputs have no
            batch dimension.
    """
    if sizes is None:
        return [list(tensors)]
    wanted = _in_order(layout, sizes)
    each = list(zip(tensors, layout.dims, strict=True))
    return [[_resized(tensor, dim, size) for tensor, dim in each] for size in wanted]


def sizes(
    example_inputs: Any,
    batch_sizes: Sequence[int] | None,
    options: BatchOptions = DEFAULT_OPTIONS,
    parameters: Parameters = UNKNOWN_PARAMETERS,
) -> list[int]:
    """Return the batch sizes that will be measured, smallest first.

    Args:
        example_inputs: one micro-batch.
        batch_sizes: as for ``profile``: None (default) for the example's own.
        options: the declared batch layout.
        parameters: the signature of the model's forward method.

    Raises:
        InputError: as for ``call_arguments``, ``trackable`` and ``resized``.
    """
    _, _, layout = trackable(
        *input_forms.call_arguments(example_inputs, "example_inputs"), options, parameters
    )
    return [layout.size] if batch_sizes is None else _in_order(layout, batch_sizes)


def _in_order(layout: BatchLayout, sizes: Sequence[int]) -> list[int]:
    """Return the validated sizes, smallest first."""
    wanted = list(sizes) if isinstance(sizes, Iterable) else []
    if (
        not wanted
        or any(
            not isinstance(size, Integral) or isinstance(size, bool) or size < 1 for size in wanted
        )
        or len(set(wanted)) < len(wanted)
    ):
        raise InputError(
            f"batch_sizes={sizes!r}: give different whole numbers of samples, such as (8, 16)"
        )
    if layout.lists:
        raise InputError(
            f"{min(layout.lists)!r} is a list of samples, which batch_sizes cannot repeat or cut; "
            "profile an example of each size by itself"
        )
    if all(dim is None for dim in layout.dims):
        raise InputError(
            "the example inputs have no dimension that could be the batch, so batch_sizes has no "
            "meaning; leave batch_sizes out"
        )
    return sorted(wanted)


def _resized(tensor: Any, dim: int | None, size: int) -> Any:
    if dim is None or tensor.shape[dim] == size:
        return tensor
    # ``clone`` gives each size its own contiguous memory, as a real batch has
    return torch.cat([tensor] * -(-size // tensor.shape[dim]), dim).narrow(dim, 0, size).clone()


def _trackable(item: Any) -> Any:
    return item.clone() if isinstance(item, Tensor) and item.is_inference() else item


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put the model in training or evaluation mode, then restore every module's own mode.

    Nothing changes if the root is in that mode already: frozen parts of a model in training may be
    in evaluation mode on purpose.
    """
    before = {module: module.training for module in model.modules()}
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, was in before.items():
            module.training = was
