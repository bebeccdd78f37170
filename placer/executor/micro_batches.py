"""Micro-batches of a call or a training step: their inputs, and how results are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from placer.capture import autocast
from placer.capture.batch_dims.batch_layout import BatchLayout, Call, Parameters, Part
from placer.capture.batch_dims.declared_layout import require_batch_options
from placer.capture.export import nested_ops
from placer.capture.pytrees import Structure, flatten_inputs
from placer.errors import InputError, kind_of
from placer.executor.checks.batch_check import BatchChecks, Weights
from placer.executor.output_joining import Joining
from placer.executor.placed_model import PlacedModel
from placer.executor.settings import Settings
from placer.schema import BatchOptions

# A number of samples larger than any number of micro-batches.
_MANY = 1 << 20


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of one call.

    Attributes:
        layout: the batch dimensions of the call's inputs.
        sizes: samples in each micro-batch.
        parts: the inputs of each micro-batch.
        joining: how their results are joined.
        tensors: the call's inputs, flattened.
        inputs: their structure.
        parameters: the signature of the model's forward method.
    """

    layout: BatchLayout
    sizes: list[int]
    parts: list[Part]
    joining: Joining
    tensors: list[Any]
    inputs: Structure
    parameters: Parameters


class Cutter:
    """The splitting of one flow's calls, with the kinds of batches that were verified.

    Args:
        placed: the model.
        settings: of the flow.
    """

    def __init__(self, placed: PlacedModel, settings: Settings) -> None:
        self._placed = placed
        self._settings = settings
        self._checks = BatchChecks(placed.module)

    def cut(
        self,
        call: Call,
        options: BatchOptions,
        sizes_of: Callable[[int], list[int]],
        weigh: Weights,
        needed: bool = False,
    ) -> MicroBatches:
        """Split a call after verifying that calls of its kind may be split.

        Args:
            call: positional and keyword arguments.
            options: the declared batch layout.
            sizes_of: a function from the number of samples to the samples in each micro-batch.
            weigh: a function from the number of samples to the weight of each in a mean; None for
                equal weights.
            needed: whether to capture the model in any case, to find inputs that are not part of
                the batch.

        Raises:
            BatchError: if micro-batches give other results than the batch.
            InputError: if the options do not fit the call, or it cannot be split.
        """
        require_batch_options(options)
        captures = self._placed.captures
        tensors, inputs = flatten_inputs(*call)
        layout = captures.layout(call, tensors, inputs, options)
        sizes = sizes_of(layout.size)
        # The flow's default options need not fit every call. If nothing can be split, the layout
        # has a single sample, so ``sizes_of`` is asked with a large number whether several parts
        # are wanted.
        is_given = options is not self._settings.batch_options
        if layout.misfit and (is_given or len(sizes_of(_MANY)) > 1):
            layout.refuse_misfit()
        if len(sizes) < 2:
            whole = Part(tensors, inputs, layout.dims)
            return MicroBatches(
                layout,
                sizes,
                [whole],
                Joining.from_options(options),
                tensors,
                inputs,
                captures.parameters,
            )
        # symbolic in a graph, even for inputs that turn out not to be part of the batch
        dims = layout.dims
        layout = captures.narrowed(layout, tensors, inputs, needed)
        parts = self._parts(call, layout, tensors, inputs, sizes, options, dims)
        known = call, captures.parameters, layout, sizes, options
        mode, can_be_run = (
            (captures.module.training, autocast.current_dtypes()),
            partial(self._can_be_run, parts[0]),
        )
        joining = self._checks.joining(*known, mode, self._placed.run_unsplit, weigh, can_be_run)
        return MicroBatches(layout, sizes, parts, joining, tensors, inputs, captures.parameters)

    def _can_be_run(self, part: Part) -> bool:
        """Return whether no operation of the model compiles its body, as torch.cond does."""
        # constants created in inference mode could not be used in training later
        with torch.inference_mode(False):
            captures = self._placed.captures.captures([part], needed=False) or []
        return not any(
            nested_ops.has_nested_graphs(capture.exported.module) for capture in captures
        )

    def _parts(
        self,
        call: Call,
        layout: BatchLayout,
        tensors: list[Any],
        inputs: Structure,
        sizes: Sequence[int],
        options: BatchOptions,
        dims: tuple[int | None, ...],
    ) -> list[Part]:
        if not layout.lists:
            return [Part(part, inputs, dims) for part in layout.cut(tensors, sizes)]
        calls = layout.cut_call(call, self._placed.captures.parameters, sizes)
        return [Part(*flatten_inputs(*some), self._laid_out(some, options).dims) for some in calls]

    def _laid_out(self, call: Call, options: BatchOptions) -> BatchLayout:
        return self._placed.captures.layout(call, *flatten_inputs(*call), options)


def weights_of(
    options: BatchOptions, inputs: Any, target: Any, size: int, advice: str = ""
) -> Tensor | None:
    """Return the weight of each sample in the loss, float64 of shape ``(N,)``.

    Args:
        options: the declared batch layout.
        inputs: of the batch, as the caller gave them.
        target: of the batch, as the caller gave it.
        size: samples in the batch, N.
        advice: added to the message if the user's function fails.

    Returns:
        The weights; None for equal weights.

    Raises:
        InputError: if ``weigh`` fails or does not return a number for each sample.
    """
    if options.weigh is None:
        return None
    try:
        weights = options.weigh(inputs, target)
    except Exception as error:  # a user's function may raise anything
        what = f"{type(error).__name__}: {error}"
        call = "weigh(inputs, target)" if inputs is not None else "weigh(None, target)"
        raise InputError(f"{call} failed: {what}{advice}") from error
    if weights is None and getattr(options.weigh, "may_give_none", False):
        return None
    if not isinstance(weights, Tensor) or weights.shape != (size,):
        given = (
            f"a tensor of shape {tuple(weights.shape)}"
            if isinstance(weights, Tensor)
            else kind_of(weights)
        )
        raise InputError(
            f"weigh gave {given}; let it give a tensor of a number for each of the {size} samples"
        )
    with torch.no_grad():
        return weights.detach().double()
