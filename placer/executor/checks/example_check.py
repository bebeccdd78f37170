"""Verification of example inputs, before a model is measured for micro-batches of other sizes.

A flow verifies each kind of batches when it first splits one. A placement whose numbers depend on
the number of samples is wrong earlier: where dimension 0 is the length of a sequence, each step
would count as a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture import input_forms
from placer.capture.batch_dims.batch_layout import Call, Parameters
from placer.capture.batch_dims.declared_layout import call_layout
from placer.capture.pytrees import flatten_inputs
from placer.errors import BatchError
from placer.executor.checks.batch_check import BatchChecks
from placer.executor.micro_batches import Cutter
from placer.executor.placed_model import PlacedModel
from placer.executor.settings import Settings
from placer.executor.state.placed_weights import PlacedWeights
from placer.schema import BatchOptions

MOST_HOST_BYTES = 4 * 2**30
"""Parameters of the largest model that runs on the CPU for this: beyond, a run takes minutes."""


def verify_example(model: nn.Module, example_inputs: Any, options: BatchOptions) -> None:
    """Raise a BatchError if two parts of the example inputs give other results than the whole.

    Nothing is verified if the model cannot run where it is: on ``meta``, on several devices, or on
    the CPU with more than ``MOST_HOST_BYTES`` of parameters. The flow verifies its first batch in
    any case.

    Args:
        model: the model; its state, random numbers and mode are left unchanged.
        example_inputs: one micro-batch, on any device.
        options: the declared batch layout.

    Raises:
        BatchError: the message names the output and, if known, the declaration that is right.
    """
    place = _place(model)
    call = input_forms.call_arguments(example_inputs, "example_inputs")
    if place is None or any(_is_meta(leaf) for leaf in flatten_inputs(*call)[0]):
        return
    call = _moved(call, place)
    parameters = Parameters.from_module(model)
    layout = call_layout(call, *flatten_inputs(*call), options, parameters)
    settings = Settings([place], place, False, batch_options=options)
    unplaced = PlacedModel(PlacedWeights(model), settings)
    try:
        BatchChecks(model).joining(
            call, parameters, layout, _halves(layout.size), options, None, unplaced.run_unsplit
        )
    except BatchError:
        # A capture shows which inputs only happen to have the batch's size. It takes long, so it
        # is made only to confirm a refusal, and the cutter then raises the error.
        Cutter(unplaced, settings).cut(call, options, _halves, lambda size: None)


def _halves(size: int) -> list[int]:
    """Return the sizes of two micro-batches; of one if there are fewer than two samples."""
    return [size // 2, size - size // 2] if size > 1 else [size]


def _place(model: nn.Module) -> torch.device | None:
    """Return the device that holds the model; None if the model cannot run for a comparison."""
    state = [*model.parameters(), *model.buffers()]
    places = {tensor.device for tensor in state} or {devices.HOST}
    if len(places) > 1:
        return None
    (place,) = places
    is_large = sum(tensor.nbytes for tensor in state) > MOST_HOST_BYTES
    return None if place.type == "meta" or (place.type == "cpu" and is_large) else place


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


def _moved(call: Call, place: torch.device) -> Call:
    """Return the arguments on a device."""
    leaves, structure = flatten_inputs(*call)
    moved: Sequence[Any] = [leaf.to(place) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    found: Call = structure.unflatten(list(moved))
    return found
