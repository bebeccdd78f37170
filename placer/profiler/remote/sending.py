"""Graphs of a model that another machine can profile; weights are not included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from placer.capture import input_forms
from placer.capture.batch_dims.batch_layout import Parameters
from placer.capture.batch_dims.declared_layout import DEFAULT_OPTIONS
from placer.capture.granularity import Granularity
from placer.capture.serialization import to_wire
from placer.devices import unobserved
from placer.profiler import profile_inputs
from placer.profiler.profile import capture_each, refuse_absent_results
from placer.schema import BatchOptions
from placer.schema.graph import Graph


def describe(
    model: nn.Module,
    example_inputs: Any,
    *,
    training: bool = True,
    granularity: Granularity = "auto",
    batch_sizes: Sequence[int] | None = None,
    options: BatchOptions = DEFAULT_OPTIONS,
) -> list[Graph]:
    """Capture a model and describe it as data; the model stays unchanged.

    Args:
        model: any module, on any device, ``meta`` included.
        example_inputs: one micro-batch, as for ``profile``.
        training: whether to profile a training step or inference.
        granularity: how the model is divided into layers.
        batch_sizes: as for ``profile``.
        options: the declared batch layout.

    Returns:
        One graph, or one for each batch size, the smallest first.

    Raises:
        InputError: if inputs, granularity or batch sizes are invalid.
        CaptureError: if the model cannot be captured or has an operation that cannot be described.
    """
    args, kwargs = input_forms.call_arguments(example_inputs, "example_inputs")
    with unobserved(), torch.inference_mode(False), profile_inputs.mode(model, training):
        tensors, structure, layout = profile_inputs.trackable(
            args, kwargs, options, Parameters.from_module(model)
        )
        given = profile_inputs.resized(tensors, layout, batch_sizes)
        graphs = capture_each(
            model, [structure.unflatten(batch) for batch in given], granularity, options=options
        )
        refuse_absent_results(options, graphs[0])
    return [to_wire(graph) for graph in graphs]
