"""The estimated profile of a model: capture, evaluate on fake tensors, write."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from placer import schema
from placer.capture import input_forms
from placer.capture.argument_checks import require_module
from placer.capture.batch_dims.batch_layout import Parameters
from placer.capture.batch_dims.declared_layout import DEFAULT_OPTIONS
from placer.capture.layers import LayerGraph
from placer.devices import CPU, unobserved
from placer.estimator.fake_layers import FakeLoss, estimate_layers
from placer.estimator.repeated_blocks import short_model, whole_profile
from placer.optimizers import OptimizerLike, OptimizerState
from placer.profiler import profile_inputs
from placer.profiler.loss_measurement import Loss, given_loss, with_loss
from placer.profiler.profile import capture_each, refuse_absent_results
from placer.profiler.profile_writer import write
from placer.profiler.remote.replay import rebuild
from placer.schema.graph import Graph
from placer.utils.option_checks import require_flags

__all__ = ["estimated_graph_profile", "estimated_profile"]


def estimated_profile(
    model: nn.Module,
    example_inputs: Any,
    cluster: schema.Cluster,
    options: schema.ProfileOptions | None = None,
    *,
    training: bool = True,
) -> schema.Profile:
    """Estimate the memory of a model's layers without its weights and without its devices.

    Args:
        model: any module, on any device; best on ``meta``, where one of many equal blocks stands
            for others. Its weights are neither copied nor read.
        example_inputs: one micro-batch: one argument, a tuple of positional or a dict of keyword
            arguments; real, fake or ``meta`` tensors.
        cluster: the devices to estimate for, which need not exist here.
        options: the granularity, the optimizer and the batch layout count; None (default) for the
            defaults.
        training: whether to estimate a training step or inference.

    Returns:
        A profile with the cluster, all memory fields and times of 0.

    Raises:
        InputError: if the inputs or options cannot be used.
        CaptureError: if the model's layers cannot be captured.
        ProfilingError: if a layer cannot run on fake tensors.
    """
    require_module(model)
    require_flags(training=training)
    how = options or schema.ProfileOptions()
    args, kwargs = input_forms.call_arguments(example_inputs, "example_inputs")
    with unobserved(), torch.inference_mode(False), profile_inputs.mode(model, training):
        short = short_model(model, args, kwargs)
        if short is not None:
            part = _estimated(short.module, args, kwargs, cluster, how, training)
            whole = whole_profile(part, short)
            if whole is not None:
                return whole
        return _estimated(model, args, kwargs, cluster, how, training)


def _estimated(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cluster: schema.Cluster,
    how: schema.ProfileOptions,
    training: bool,
) -> schema.Profile:
    """Return the profile of a model that is captured unchanged."""
    batch_options = how.batch_options or DEFAULT_OPTIONS
    tensors, structure, layout = profile_inputs.trackable(
        args, kwargs, batch_options, Parameters.from_module(model)
    )
    loss = given_loss(how.loss_fn, how.target, training, layout.size, batch_options)
    tensors = _near(model, tensors)
    (graph,) = capture_each(
        model, [structure.unflatten(tensors)], how.granularity, options=batch_options
    )
    refuse_absent_results(batch_options, graph)
    profile = _profile(graph, tensors, cluster, training, how.optimizer, loss)
    return profile.model_copy(update={"batch_options": batch_options})


def estimated_graph_profile(
    graph: Graph, cluster: schema.Cluster, optimizer: OptimizerLike = "adam"
) -> schema.Profile:
    """Estimate the memory of a received graph's layers, see ``estimated_profile``.

    Args:
        graph: the captured graph; it says whether it was captured in training.
        cluster: the devices to estimate for.
        optimizer: the optimizer whose state counts in training; None for none.

    Raises:
        InputError: if the graph has a forbidden operator; the message names the layer.
        ProfilingError: if a layer cannot run on fake tensors.
    """
    rebuilt = rebuild(graph)
    with unobserved(), torch.inference_mode(False):
        inputs = [rebuilt.values[name].on_meta() for name in rebuilt.inputs]
        return _profile(rebuilt, inputs, cluster, rebuilt.training, optimizer)


def _profile(
    graph: LayerGraph,
    inputs: Sequence[Any],
    cluster: schema.Cluster,
    training: bool,
    optimizer: OptimizerLike,
    loss: Loss | None = None,
) -> schema.Profile:
    on_gpu = {device.type: not device.type.startswith(CPU) for device in cluster.devices}
    fake_loss = (
        None if loss is None else FakeLoss(loss.function, loss.target, loss.structure, loss.layout)
    )
    found = {
        is_gpu: estimate_layers(graph, inputs, training, is_gpu, fake_loss)
        for is_gpu in {*on_gpu.values()}
    }
    measured = {kind: found[is_gpu].layers for kind, is_gpu in on_gpu.items()}
    profile = write(
        graph, measured, training, OptimizerState(optimizer if training else None), cluster
    )
    if loss is None:
        return profile
    losses = {
        kind: row for kind, is_gpu in on_gpu.items() if (row := found[is_gpu].loss) is not None
    }
    return with_loss(profile, graph, loss, losses)


def _near(model: nn.Module, inputs: Sequence[Any]) -> list[Any]:
    """Return inputs that capture accepts together with the model's parameters.

    A tensor without data becomes one on ``meta`` or, if the model has weights, zeros on their
    device.
    """
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    place = torch.device("cpu") if first is None else first.device
    return [
        torch.zeros(item.shape, dtype=item.dtype, device=place)
        if isinstance(item, Tensor) and (item.is_meta or isinstance(item, FakeTensor))
        else item
        for item in inputs
    ]
