"""The profile of a model: capture, measure, write."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
from torch import nn

from placer import schema
from placer.capture import input_forms
from placer.capture.argument_checks import require_module
from placer.capture.batch_dims.batch_layout import Parameters
from placer.capture.batch_dims.declared_layout import (
    DEFAULT_OPTIONS,
    refuse_absent_outputs,
)
from placer.capture.capture import capture_graph
from placer.capture.granularity import Granularity
from placer.capture.layers import LayerGraph
from placer.capture.pytrees import outline
from placer.devices import (
    CPU,
    DeviceLike,
    disk_folder,
    keep_random_state,
    resolve,
    type_name,
    unobserved,
    warm_libraries,
)
from placer.errors import ProfilingError
from placer.optimizers import OptimizerLike, OptimizerState
from placer.profiler import profile_inputs
from placer.profiler.cache.file_cache import Cache, open_cache
from placer.profiler.cache.graph_cache import KnownGraphs
from placer.profiler.cache.layer_cache import Remembered
from placer.profiler.conditions import CoreWaits, busy, conditions, optimizer_facts
from placer.profiler.links.cluster import MemoryLimit, measure, resolve_limits, steps
from placer.profiler.loss_measurement import Loss, given_loss, with_loss
from placer.profiler.measure import Measurement, measure_layers
from placer.profiler.profile_writer import fragmented_bytes, write
from placer.profiler.progress import Bar, Shown, Step, progress_bar, require_shown
from placer.schema import BatchOptions, ProfileOptions
from placer.schema.options import combined
from placer.utils.error_translation import reason
from placer.utils.option_checks import require_flags

_log = logging.getLogger(__name__)


@overload
def profile(
    model: nn.Module,
    example_inputs: Any,
    devices: int | Sequence[DeviceLike] | None = None,
    *,
    training: bool = True,
    memory_bytes: MemoryLimit = None,
    batch_sizes: None = None,
    progress: Shown = True,
    options: ProfileOptions | None = None,
    **fields: Any,
) -> schema.Profile: ...


@overload
def profile(
    model: nn.Module,
    example_inputs: Any,
    devices: int | Sequence[DeviceLike] | None = None,
    *,
    training: bool = True,
    memory_bytes: MemoryLimit = None,
    batch_sizes: Sequence[int],
    progress: Shown = True,
    options: ProfileOptions | None = None,
    **fields: Any,
) -> list[schema.Profile]: ...


def profile(
    model: nn.Module,
    example_inputs: Any,
    devices: int | Sequence[DeviceLike] | None = None,
    *,
    training: bool = True,
    memory_bytes: MemoryLimit = None,
    batch_sizes: Sequence[int] | None = None,
    progress: Shown = True,
    options: ProfileOptions | None = None,
    **fields: Any,
) -> schema.Profile | list[schema.Profile]:
    """Measure a model's layers, the values between them, the devices and the links.

    Every layer runs alone, with its state copied to the device. A model that is larger than any
    device, or on ``meta``, can be measured, too. The model is left unchanged: parameters,
    gradients, buffers and modes; so are the random number generators.

        profile(model, inputs)
        profile(model, inputs, optimizer="sgd", cache=False)

    Args:
        model: any module, on any device.
        example_inputs: one micro-batch: one argument, a tuple of positional or a dict of keyword
            arguments.
        devices: the devices to measure: a number, a list, or None for all available devices. Each
            type of device is measured once.
        training: whether to measure a training step, with the model in training mode, or
            inference, with the model in evaluation mode.
        memory_bytes: the memory that a placement may use, in bytes or as ``"24GiB"``, of each
            device or by device; by default all of it.
        batch_sizes: measure micro-batches of these sizes instead of the example's. The example's
            inputs and target are repeated or cut. The layers are cut for the smallest size, and
            are the same for all.
        progress: show a bar on stderr if that is a terminal; ``"always"`` shows it everywhere.
        options: how to measure, in addition to the arguments above.
        fields: single fields of ``options``, for short.

    Returns:
        The profile, with its cluster; for several batch sizes a list of profiles, the smallest
        size first.

    Raises:
        InputError: inputs, ``training``, devices, limits, batch sizes or options cannot be used.
        CaptureError: the model's layers cannot be captured.
        ProfilingError: a layer, a link or the loss could not be measured.
    """
    require_module(model)
    require_flags(training=training)
    require_shown(progress)
    how = combined(ProfileOptions, options, fields, profile)
    batch_options = how.batch_options or DEFAULT_OPTIONS
    repeats, optimizer = how.repeats, how.optimizer
    args, kwargs = input_forms.call_arguments(example_inputs, "example_inputs")
    found = resolve(devices)
    limits = resolve_limits(found, memory_bytes)
    folder = open_cache(how.cache)
    disk = None if how.disk_folder is None else disk_folder(how.disk_folder)
    # checked in inference, too, so that a misspelt name is reported
    named = OptimizerState(optimizer)
    state = named if training else OptimizerState(None)
    # Devices of one type have equal times, so one of them is measured for all.
    by_type = _first_of_each_type(found)
    with (
        unobserved(),
        keep_random_state(found),
        torch.inference_mode(False),
        profile_inputs.mode(model, training),
    ):
        tensors, structure, layout = profile_inputs.trackable(
            args, kwargs, batch_options, Parameters.from_module(model)
        )
        given = profile_inputs.resized(tensors, layout, batch_sizes)
        loss = given_loss(how.loss_fn, how.target, training, layout.size, batch_options)
        known = {
            kind: _remembered(folder, device, training, optimizer, repeats)
            for kind, device in by_type.items()
        }
        calls = [structure.unflatten(batch) for batch in given]
        # workspaces first, so that no layer's measurement includes them
        _warm(found)
        with progress_bar(progress, steps(found, folder, disk)) as step:
            rows = list(known.values())
            graphs = _graphs(
                model, calls, how.granularity, folder, rows, step, loss is not None, batch_options
            )
            if loss is None:
                refuse_absent_results(batch_options, graphs[0])
            _expect_layers(step, graphs, rows)
            # contention during the measurements, which are timed on the CPU's clock
            waits = CoreWaits()
            measured = [
                {
                    kind: measure_layers(
                        graph, batch, device, training, repeats, step, state, known[kind]
                    )
                    for kind, device in by_type.items()
                }
                for graph, batch in zip(graphs, given, strict=True)
            ]
            waited = waits.share()
            losses = _losses(loss, graphs, measured, by_type, batch_sizes, repeats, step)
            if loss is not None:
                refuse_absent_results(batch_options, graphs[0], loss.values)
            cluster = measure(found, limits, step, folder, fragmented_bytes(measured), disk)
    _log_counts([*known.values()])
    written = {"batch_options": batch_options}
    profiles = [
        write(graph, rows, training, state, cluster, by_type).model_copy(update=written)
        for graph, rows in zip(graphs, measured, strict=True)
    ]
    _warn_of_unsteady_times(profiles, by_type, waited)
    if loss is not None:
        # the loss is added last, so that cached layers exclude it
        each = zip(profiles, graphs, loss.resized(batch_sizes), losses, strict=True)
        profiles = [with_loss(*of_size) for of_size in each]
    return profiles[0] if batch_sizes is None else profiles


def _first_of_each_type(found: Sequence[torch.device]) -> dict[str, torch.device]:
    """Return by type the first device; devices of one type are interchangeable."""
    by_type: dict[str, torch.device] = {}
    for device in found:
        by_type.setdefault(type_name(device), device)
    return by_type


def _expect_layers(step: Bar, graphs: Sequence[LayerGraph], known: Sequence[Remembered]) -> None:
    """Add the layers that are not cached to the progress bar."""
    layers = [layer for graph in graphs for layer in graph.layers]
    step.expect(sum(len(of_kind.missing(layers)) for of_kind in known))


def _log_counts(known: Sequence[Remembered]) -> None:
    measured, reused = sum(one.measured for one in known), sum(one.reused for one in known)
    _log.info("%d layers were measured, %d taken from the cache", measured, reused)


def _warn_of_unsteady_times(
    profiles: Sequence[schema.Profile], by_type: Mapping[str, torch.device], waited: float
) -> None:
    """Warn once per device type if its times varied, or if other processes used its cores."""
    for kind, device in by_type.items():
        waiting = busy(kind, waited) if device.type == CPU else ""
        if warning := next(filter(None, (*(one.unsteady(kind) for one in profiles), waiting)), ""):
            _log.warning("%s", warning)


def _warm(found: Sequence[torch.device]) -> None:
    """Allocate the workspaces of the devices' libraries, which take memory permanently."""
    for device in found:
        try:
            warm_libraries(device)
        except torch.OutOfMemoryError as error:
            raise ProfilingError(
                f"{device} has too little memory free to begin with: end what holds it there, or "
                f"leave it out of devices= ({reason(error)})"
            ) from error


def _losses(
    loss: Loss | None,
    graphs: Sequence[LayerGraph],
    measured: Sequence[Mapping[str, Sequence[Measurement]]],
    by_type: Mapping[str, torch.device],
    batch_sizes: Sequence[int] | None,
    repeats: int,
    step: Bar,
) -> list[dict[str, Measurement]]:
    """Return for each batch size the loss's measurement by device type."""
    if loss is None:
        return []
    step.expect(len(graphs) * len(by_type))
    found: list[dict[str, Measurement]] = []
    for graph, rows, of_size in zip(graphs, measured, loss.resized(batch_sizes), strict=True):
        found.append({})
        for kind, device in by_type.items():
            step("loss")
            found[-1][kind] = of_size.measure(graph, rows[kind], device, repeats)
    return found


def _graphs(
    model: nn.Module,
    calls: Sequence[Any],
    granularity: Granularity,
    folder: Cache | None,
    known: Sequence[Remembered],
    step: Bar,
    with_result: bool,
    options: BatchOptions,
) -> list[LayerGraph]:
    """Return the graph of each call, captured only if it is not cached and fully measured.

    ``with_result`` requires the structure of the model's result, which a cached graph may lack.
    """
    earlier = KnownGraphs(folder, model, calls, granularity, options)
    found = earlier.read()
    if found is not None and with_result and any(graph.result is None for graph in found):
        found = None
    if found is not None and not any(
        of_kind.missing(graph.layers) for of_kind in known for graph in found
    ):
        return found
    step.expect(len(calls))
    graphs = capture_each(model, calls, granularity, step, options)
    earlier.keep(graphs)
    return graphs


def refuse_absent_results(options: BatchOptions, graph: LayerGraph, *values: Any) -> None:
    """Raise an InputError if ``options.outputs`` names a value that the model does not return.

    Args:
        options: the declared batch layout.
        graph: the model's graph.
        values: the further values of the loss, if there is one.
    """
    if (
        graph.result is not None
    ):  # cached graphs have no result, and are not used if outputs have names
        refuse_absent_outputs(options, outline(graph.result), *values)


def capture_each(
    model: nn.Module,
    calls: Sequence[Any],
    granularity: Granularity,
    step: Step | None = None,
    options: BatchOptions = DEFAULT_OPTIONS,
) -> list[LayerGraph]:
    """Return the graph of each (args, kwargs) call; all have the layers of the first.

    Args:
        model: the model, in the mode to profile.
        calls: positional and keyword arguments, one call per batch size.
        granularity: how the first call's graph is divided into layers.
        step: called with a description when a capture begins.
        options: the declared batch layout.

    Raises:
        ProfilingError: if the model has no operations, or other layers at another batch size.
    """
    graphs: list[LayerGraph] = []
    for number, (args, kwargs) in enumerate(calls, start=1):
        if step is not None:
            step("capture" if len(calls) == 1 else f"capture {number} of {len(calls)}")
        # The names of the first graph's layers are the granularity of the others, so that all
        # profiles have the same layers.
        cut = tuple(layer.name for layer in graphs[0].layers) if graphs else granularity
        graphs.append(capture_graph(model, args, kwargs, granularity=cut, batch_options=options))
        graphs[-1].granularity = graphs[0].granularity
        if not graphs[0].layers:
            raise ProfilingError(
                f"{type(model).__name__} has no operations, so there is nothing to place"
            )
        if [layer.name for layer in graphs[-1].layers] != [
            layer.name for layer in graphs[0].layers
        ]:
            sizes = f"{graphs[0].batch_size} and {graphs[-1].batch_size}"
            raise ProfilingError(
                f"{type(model).__name__} has other layers at batch sizes of {sizes}; profile each "
                "size apart"
            )
    return graphs


def _remembered(
    folder: Cache | None,
    device: torch.device,
    training: bool,
    optimizer: OptimizerLike,
    repeats: int,
) -> Remembered:
    """Return the known measurements under the current conditions of this device."""
    steps = optimizer_facts(optimizer if training else None)
    if folder is None or steps is None:
        return Remembered()
    return Remembered(
        folder, conditions(device) | {"training": training, "optimizer": steps}, repeats
    )
