"""Construction of one process's part of a pipeline on torch.distributed.pipelining.

    capture ─▶ stages in a line ─▶ seats (gather, compare) ─▶ weights ─▶ library stages, schedule

Steps marked ``together`` are collective: all processes succeed, or all raise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from placer import devices
from placer.capture import input_forms
from placer.capture.argument_checks import require_loss_function, require_module
from placer.capture.batch_dims.batch_layout import BatchLayout, Parameters
from placer.capture.batch_dims.batch_symbols import inputs_of_other_lengths
from placer.capture.batch_dims.declared_layout import input_layout, refuse_absent_outputs
from placer.capture.capture import layer_graph
from placer.capture.export.export import Exported, export
from placer.capture.layers import LayerGraph
from placer.capture.loss_functions import LossFunction
from placer.capture.pytrees import flatten_inputs, outline
from placer.distributed import schedules
from placer.distributed.collective_errors import gathered, gpus, together
from placer.distributed.output_reach import Flows
from placer.distributed.pipeline import Pipeline, Shape
from placer.distributed.pipeline_head import Head
from placer.distributed.pipeline_options import PipelineOptions
from placer.distributed.ranks import Process, Seat, refuse_missing_gpus, seats
from placer.distributed.replicas import Pipelines, pipelines
from placer.distributed.stage import StageModule
from placer.distributed.stage_line import Line, line
from placer.distributed.stage_passes import ReportingStage, UnitStage
from placer.distributed.state.partial_modules import Names, plant
from placer.distributed.state.rank_weights import (
    Holders,
    Sharing,
    Weights,
    division_of,
    holders_of,
    keep_holders,
    process_text,
)
from placer.errors import CaptureError, InputError, PlacementError, kind_of
from placer.executor.checks.batch_check import BatchChecks
from placer.executor.engine.shares import refuse_unreplicable
from placer.executor.output_joining import Joining
from placer.executor.state.assignment import Assignment, layer_names, refuse_unknown_layers
from placer.executor.training.loss.loss_weights import Weighing, merged
from placer.schema import BatchOptions, Placement
from placer.schema.options import Weigh


@torch.inference_mode(False)  # in inference mode, copies of tied weights could not be trained
def build(
    model: nn.Module,
    placement: Placement | Mapping[str, Any],
    example_inputs: Any,
    loss_fn: LossFunction | None = None,
    *,
    chunks: int | None = None,
    schedule: str | None = None,
    recompute: Collection[str] | None = None,
    group: dist.ProcessGroup | None = None,
    weigh: Weigh | None = None,
    batch_options: BatchOptions | None = None,
) -> Pipeline:
    """Return this process's stages of a placed model, with their schedule.

    Every process calls it with the same arguments.

    Args:
        model: the whole model, on the CPU or on meta, equal in every process. This process's part
            is moved to its device (the same Parameter objects, except on meta); the rest stays, and
            is freed with the model.
        placement: a placement (or its JSON as a dict), or a map from layer to device. Devices are
            named ``cuda:0`` or, on several hosts, ``HOST/cuda:0``. The number of processes must
            equal the number of devices, see ``placer.distributed.ranks``. If stages have replicas,
            these share each micro-batch as the placement states.
        example_inputs: one micro-batch: a tensor, a tuple of positional or a dict of keyword
            arguments. With replicas, it has the samples of all of them.
        loss_fn: ``loss_fn(output, target)``, a mean over samples unless ``batch_options`` state
            otherwise; None (default) for inference. Further values in addition to the loss are not
            returned.
        chunks: micro-batches in a batch; None (default) for the placement's.
        schedule: ``fill-drain``, ``1f1b``, ``interleaved`` or ``zero-bubble``; None (default) for
            the placement's.
        recompute: devices that save only the inputs of a micro-batch, and run forward again in its
            backward pass; None (default) for the placement's.
        group: the process group of the pipeline; None (default) for all processes. A placement
            with replicas needs all processes.
        weigh: ``weigh(None, target)``, the weight of each sample in the loss, as for
            ``DataFlow.train_step``.
        batch_options: batch dimensions, joining of results and reduction of the loss, as for
            ``DataFlow``; None (default) for the placement's. Lists of samples are not supported.

    Returns:
        The pipeline: stages, schedule, and ``step``, which runs both.

    Raises:
        BatchError: if micro-batches give other results than a whole batch.
        InputError: if torch.distributed is not initialised, chunks or schedule are invalid, the
            processes' models differ, nothing requires a gradient, or another process could not
            build its part.
        PlacementError: if the placement does not fit the model or the processes.
        CaptureError: if the model cannot be captured.
    """
    if not dist.is_initialized():
        raise InputError(
            "start with torchrun, and call torch.distributed.init_process_group() before build()"
        )
    _refuse_no_group(group)
    if dist.get_rank(group) < 0:
        raise InputError(
            f"process {dist.get_rank()} is not in the group: call build() only in the group's "
            "processes"
        )
    with together(group, "build its part"):
        require_module(model)
        placed = PipelineOptions.from_arguments(
            placement, chunks, schedule, recompute, batch_options
        )
        _refuse_part_of_the_world(placed, group)
        if loss_fn is not None:
            _refuse_untrained(model, loss_fn)
        loss = None if loss_fn is None else Weighing(loss_fn, merged(placed.options, weigh))
        refuse_unknown_layers(model, placed.layer_devices, layer_names(model, fine_grained=False))
        layout = input_layout(model, example_inputs, placed.options, "example_inputs")
        _refuse_lists(layout)
    everyone = _everyone(placed, loss_fn is not None, group)
    shared = _pipelines(model, placed, layout.size, everyone, group)
    with together(group, "build its part"):
        example_inputs, layout = _part(model, example_inputs, layout, shared)
        exported = _captured(model, example_inputs, layout)
        if (
            batch_options is not None and loss_fn is None
        ):  # with a loss, the names may be its values
            refuse_absent_outputs(batch_options, outline(exported.outputs))
        unrelated = inputs_of_other_lengths(exported.module.graph, layout.dims)
        layout = layout.without(unrelated.intersection(layout.undeclared()))
        graph = _without_leftovers(
            layer_graph(exported, model, tuple(placed.layer_devices)), exported
        )
        cut = line(graph, _places(graph, placed.layer_devices))
        schedules.check(
            placed.schedule, placed.chunks, len(cut.devices), cut.rounds, shared.are_shared
        )
        if unknown := placed.recompute - set(cut.devices):
            raise InputError(
                f"recompute names {min(unknown)!r}, which has no layers "
                f"(devices with layers: {', '.join(cut.devices)})"
            )
        _refuse_empty_stages(placed, cut)
        refuse_unreplicable(placed.replication, graph, model, False)
        sharing = Sharing.from_graph(graph, cut, placed.chunks)
    _refuse_other_models(cut, graph, shared, group)
    if shared.seat is None:
        shared = shared.seated(_seats(cut.devices, placed, everyone))
    seat = shared.seat
    assert seat is not None
    # every process knows its device before any process waits for the others on it
    with together(group, "build its part"):
        device = _local(seat)
    known = _known_holders(model, shared.group)
    with together(group, "build its part"):
        shape = _shape(exported, graph, placed, example_inputs, layout, shared)
        is_last = seat.device == cut.devices[-1]
        joining = _joining(model, example_inputs, layout, placed, is_last)
    # contains a warm-up that waits for all processes
    with together(group, "build its part"):
        rest = shared, shape, device, group, known, joining
        return _assemble(model, _Cut(exported, graph, cut, sharing), placed, loss, *rest)


@dataclass(frozen=True)
class _Cut:
    """A captured model, cut into stages.

    Attributes:
        exported: the capture.
        graph: its layers.
        line: the stages.
        sharing: the tensors that several stages use.
    """

    exported: Exported
    graph: LayerGraph
    line: Line
    sharing: Sharing


def _refuse_no_group(group: object) -> None:
    """Raise an InputError if ``group`` is not a process group.

    A process outside a new group receives torch's placeholder value, which is accepted here.
    """
    if (
        group is None
        or group == dist.GroupMember.NON_GROUP_MEMBER
        or isinstance(group, dist.ProcessGroup)
    ):
        return
    way_out = (
        "give the group of one of its dimensions: mesh.get_group('pp')"
        if isinstance(group, DeviceMesh)
        else "give what torch.distributed.new_group([0, 1, ...]) makes, or None for all processes"
    )
    raise InputError(f"group is {kind_of(group)}; {way_out}")


def _refuse_untrained(model: nn.Module, loss_fn: Any) -> None:
    """Raise an InputError if the model or the loss cannot be trained."""
    require_loss_function(loss_fn)
    if not model.training:
        raise InputError(
            "the model is in eval mode: call model.train() to build a pipeline that trains"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"no parameter of this {type(model).__name__} requires a gradient, so there is nothing "
            "to train: call requires_grad_() on what is to be trained, or build without loss_fn to "
            "run forwards alone"
        )


def _refuse_lists(layout: BatchLayout) -> None:
    """Raise an InputError for a list of samples: stages send tensors of one shape."""
    if layout.lists:
        raise InputError(
            f"{min(layout.lists)!r} is a list of samples, which stages in several processes cannot "
            "be sent; give one tensor, or run the model with DataFlow on one host"
        )


def _joining(
    model: nn.Module,
    example_inputs: Any,
    layout: BatchLayout,
    placed: PipelineOptions,
    is_last: bool,
) -> Joining:
    """Return how results are joined, after the last stage's process verified it.

    A model on meta has no values to compare.
    """
    options, is_meta = (
        placed.options,
        any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())),
    )
    declared = Joining.from_options(options, "give build(..., chunks=1)")
    parts = placed.chunks * placed.replication.count
    if not is_last or parts == 1 or is_meta or not options.verify:
        return declared
    call = input_forms.call_arguments(example_inputs)
    tensors, inputs = flatten_inputs(*call)
    if layout.size == 1:  # use the example twice
        each = zip(tensors, layout.dims, strict=True)
        call = inputs.unflatten(
            [one if dim is None else torch.cat([one, one], dim) for one, dim in each]
        )
        layout = replace(layout, size=2)
    sizes = [layout.size // 2] * 2
    checks, parameters = BatchChecks(model), Parameters.from_module(model)
    found = checks.joining(
        call, parameters, layout, sizes, options, None, lambda some: model(*some[0], **some[1])
    )
    return replace(declared, found=found.found)


def _captured(model: nn.Module, example_inputs: Any, layout: BatchLayout) -> Exported:
    args, kwargs = input_forms.call_arguments(example_inputs, "example_inputs")
    try:
        return export(model, args, kwargs, layout.dims)
    except CaptureError as error:
        raise CaptureError(
            f"{error}. A model that cannot be captured cannot be cut apart; on one host DataFlow "
            "runs it through hooks"
        ) from error


def _without_leftovers(graph: LayerGraph, exported: Exported) -> LayerGraph:
    """Return the graph without in-place changes of inputs among its outputs.

    The process with the inputs does not have the results.
    """
    return replace(graph, outputs=graph.outputs[: len(exported.outputs.paths)])


def _places(graph: LayerGraph, layer_devices: Mapping[str, str]) -> list[str]:
    """Return the device name of every layer."""
    # the assignment only passes these names through
    named = cast(Mapping[str, torch.device], layer_devices)
    first = next(iter(named.values()))
    return cast(list[str], Assignment(named, first).of_layers(graph))


def _assemble(
    model: nn.Module,
    parts: _Cut,
    placed: PipelineOptions,
    loss_fn: Weighing | None,
    shared: Pipelines,
    shape: Shape,
    device: torch.device,
    group: dist.ProcessGroup | None,
    known: Mapping[str, Holders],
    joining: Joining,
) -> Pipeline:
    exported, graph, cut = parts.exported, parts.graph, parts.line
    own_group, chains = shared.group, shared.chains(cut.devices)
    # devices in the order of the line, processes in the order of the group: map one to the other
    position = chains[shared.own[0]].index(dist.get_rank())
    _warm_up(device, own_group)
    names = Names.from_model(model)
    holders = [shared.holders(name) for name in cut.devices]
    sharing = parts.sharing.with_owners(known, holders)
    weights = Weights(
        graph,
        sharing,
        position,
        chains,
        device,
        own_group,
        names.transient,
        shared.replicas,
        division_of(model),
    )
    if not weights.empty:
        keep_holders(model, {name: holders[users[0]] for name, users in sharing.users.items()})
    training = loss_fn is not None
    if training and shared.replicas is not None:
        weights.divide(sharing.division(model, cut.devices, placed.replication, holders))
    modules = _stage_modules(parts, placed, weights, names, device, position, training)
    kind = UnitStage if shared.are_shared else ReportingStage
    stages = [
        kind.from_module(module, index, len(cut.stages), training, own_group)
        for index, module in modules.items()
    ]
    # A process with several stages has passes left, which other processes wait for. Deferred weight
    # gradients come without a hook.
    if len(stages) == 1 and not schedules.splits(placed.schedule):
        stages[0].sums = weights.sums
    leaves = modules[max(modules)].plan.leaves
    owned = nn.Module()
    plant(owned, weights.owned(), names)
    # a loss that reads other processes' parameters is refused later
    own = {id(tensor) for tensor in weights.own.values()}
    elsewhere = {id(item): name for name, item in model.named_parameters() if id(item) not in own}
    head = Head(
        loss_fn,
        exported.outputs,
        leaves,
        joining,
        shape.sizes,
        device,
        elsewhere,
        shared,
    )
    rest = placed.chunks, head.loss if training else None
    if shared.are_shared:
        schedule = schedules.make_by_stage(placed.schedule, stages, chains, *rest, placed.room)
    else:
        everywhere = dist.get_process_group_ranks(own_group)
        ranks = [everywhere.index(rank) for rank in chains[shared.own[0]]]
        schedule = schedules.make(placed.schedule, stages, ranks, position, *rest)
    return Pipeline(
        [*stages],
        schedule,
        owned,
        device,
        weights,
        head,
        shape,
        names,
        group,
        shared,
    )


def _stage_modules(
    parts: _Cut,
    placed: PipelineOptions,
    weights: Weights,
    names: Names,
    device: torch.device,
    position: int,
    training: bool,
) -> dict[int, StageModule]:
    """Return the stages of the device at a position of the line, by their index in the line."""
    graph, cut = parts.graph, parts.line
    flows = Flows.from_graph(graph, parts.exported.module.graph) if training else Flows({})
    return {
        index: StageModule(
            graph,
            cut,
            index,
            weights.get,
            names,
            device,
            flows=flows,
            split=training and schedules.splits(placed.schedule),
            recomputes=training and cut.stages[index].device in placed.recompute,
        )
        for index in range(position, len(cut.stages), len(cut.devices))
    }


def _refuse_part_of_the_world(placed: PipelineOptions, group: dist.ProcessGroup | None) -> None:
    """Raise an InputError for replicas in a group of some processes.

    All processes have to take part where process groups are formed.
    """
    if placed.replicas and dist.get_world_size(group) < dist.get_world_size():
        raise InputError(
            f"the placement has replicas, and the group has {dist.get_world_size(group)} of "
            f"{dist.get_world_size()} processes: leave `group` out, and start one process for each "
            "device of `replicas`"
        )


def _everyone(
    placed: PipelineOptions, training: bool, group: dist.ProcessGroup | None
) -> list[tuple[Process, int]]:
    """Return each process and the number of its GPUs, after comparing the options of all."""
    process = Process.here(dist.get_rank(group))
    everyone = gathered((process, gpus(), placed.how(training)), group)
    for rank, (*_, how_there) in enumerate(everyone):
        if how_there != everyone[0][2]:
            raise InputError(
                f"process {rank} was asked to build {how_there}, and process 0 {everyone[0][2]}; "
                "give build() the same arguments in every process"
            )
    return [(process, count) for process, count, _ in everyone]


def _pipelines(
    model: nn.Module,
    placed: PipelineOptions,
    size: int,
    everyone: Sequence[tuple[Process, int]],
    group: dist.ProcessGroup | None,
) -> Pipelines:
    """Return the pipelines that share each micro-batch.

    Args:
        model: the whole model.
        placed: the placement.
        size: samples in a micro-batch.
        everyone: the processes and their GPUs.
        group: all processes.
    """
    if not placed.replicas:
        return Pipelines((size,), group=group)
    # pipelines may share a device
    names = dict.fromkeys(name for found in placed.replicas.values() for name in found)
    found = _seats([*names], placed, everyone)
    with together(group, "build its part"):
        samples = placed.samples(size)
        device = _local(found[dist.get_rank()])
    return pipelines(model, placed.replicas, samples, found, device)


def _part(
    model: nn.Module, example_inputs: Any, layout: BatchLayout, shared: Pipelines
) -> tuple[Any, BatchLayout]:
    """Return this pipeline's samples of a micro-batch, and their layout."""
    if shared.count == 1:
        return example_inputs, layout
    call = input_forms.call_arguments(example_inputs, "example_inputs")
    if len(layout.undeclared()) > 1:
        # only a capture shows which further inputs have the batch's length by coincidence
        graph = _captured(model, example_inputs, layout).module.graph
        unrelated = inputs_of_other_lengths(graph, layout.dims)
        layout = layout.without(unrelated.intersection(layout.undeclared()))
    parts = layout.cut_call(call, Parameters.from_module(model), shared.samples)
    args, kwargs = parts[shared.own[0]]
    return kwargs or args, replace(layout, size=shared.samples[shared.own[0]])


def _refuse_empty_stages(placed: PipelineOptions, cut: Line) -> None:
    """Raise a PlacementError if a device with replicas has no layer that runs."""
    for name in placed.replicas:
        if name not in cut.devices:
            raise PlacementError(
                f"no layer that runs is on {name}, which has replicas: the results of its layers "
                "are not used, or they are one with the layer before them; place another layer "
                "there, or leave the device out"
            )


def _refuse_other_models(
    cut: Line, graph: LayerGraph, shared: Pipelines, group: dist.ProcessGroup | None
) -> None:
    """Raise an InputError unless all processes have captured the same model."""
    trained = [name for name, tensor in graph.state.items() if tensor.requires_grad]
    stages = [(stage.device, stage.layers) for stage in cut.stages]
    samples = shared.samples[shared.own[0]]
    everyone = gathered((samples, graph.hash, trained, stages), group)
    # a hash depends on the number of samples
    hashes: dict[int, str] = {}
    for rank, (size, there, *found) in enumerate(everyone):
        if found != list(everyone[0][2:]) or hashes.setdefault(size, there) != there:
            raise InputError(
                f"process {rank} has captured another model, or was given another placement, than "
                "process 0; give every process the same model, with the same parameters to train, "
                "placement and shape of example"
            )


def _seats(
    names: Sequence[str], placed: PipelineOptions, everyone: Sequence[tuple[Process, int]]
) -> list[Seat]:
    """Return the device of every process.

    Args:
        names: of all devices.
        placed: the placement.
        everyone: the processes and their GPUs.
    """
    try:
        found = seats(names, [process for process, _ in everyone])
    except PlacementError as error:
        raise PlacementError(f"{error}{placed.idle(names)}") from error
    refuse_missing_gpus(found, [count for _, count in everyone])
    return found


def _known_holders(model: nn.Module, group: dist.ProcessGroup | None) -> dict[str, Holders]:
    """Return the holders of each tensor from earlier pipelines of the model in any process."""
    found: dict[str, Holders] = {}
    for known in gathered(holders_of(model), group):
        for name, holders in known.items():
            if found.setdefault(name, holders) != holders:
                raise InputError(
                    f"{name!r} belongs to {process_text(found[name])} since an earlier pipeline of "
                    f"this model, and to {process_text(holders)} since another one: load "
                    "full_state_dict() into a new model"
                )
    return found


def _local(seat: Seat) -> torch.device:
    """Return this process's device, after making it current, since the library sends from it."""
    device = devices.parse(seat.local)
    if device.type != "cuda":
        return torch.device(device.type)  # each process has its own CPU stand-in
    torch.cuda.set_device(device)
    return device


def _warm_up(device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Connect all processes at once.

    A first send among only some of them could wait for the others.
    """
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def _shape(
    exported: Exported,
    graph: LayerGraph,
    placed: PipelineOptions,
    example_inputs: Any,
    layout: BatchLayout,
    shared: Pipelines,
) -> Shape:
    inputs: Sequence[Any] = [graph.values[name] for name in graph.inputs]
    cut = [place for place, dim in enumerate(layout.dims) if dim is not None]
    # With one sample, a dimension of size 1 is no evidence for a batch dimension, except in the
    # first input.
    known = (
        set(cut)
        if sum(shared.samples) > 1
        else {*cut[:1], *(place for place in cut if layout.declared[place])}
    )
    args, kwargs = input_forms.call_arguments(example_inputs)
    return Shape(
        positional=len(args),
        keywords=tuple(kwargs),
        inputs=exported.inputs,
        shapes=tuple(value.shape for value in inputs),
        dims=tuple(dim if place in known else None for place, dim in enumerate(layout.dims)),
        dtypes=tuple(value.dtype for value in inputs),
        samples=shared.samples,
        chunks=placed.chunks,
        verify=placed.options.verify,
    )
