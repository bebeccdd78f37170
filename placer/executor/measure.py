"""``DataFlow.measure``: one batch with a mark before and behind every pass and every copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from placer import devices
from placer.capture import input_forms
from placer.capture.argument_checks import require_chunks, require_samples_for_chunks
from placer.capture.batch_dims.declared_layout import input_layout, require_batch_options
from placer.devices import Clock, Courier, Delivery
from placer.errors import InputError, kind_of
from placer.executor.engine.compiled_segments import Backend, backend_of
from placer.executor.engine.fill_drain import even_sizes
from placer.executor.engine.pass_trace import Issued
from placer.executor.engine.stage import Stage
from placer.executor.inference.stream_pipeline import InferencePipeline
from placer.executor.placed_calls import PlacedCalls
from placer.executor.placed_model import PlacedModel
from placer.executor.predict import plan_of_stages, predicted
from placer.executor.settings import Settings
from placer.executor.state.segment_state import restored
from placer.executor.training.step_rollback import Kept
from placer.executor.training.train_step import TrainStep
from placer.executor.training.training_pipeline import TrainingPipeline
from placer.report.timeline import Kind, Measurement, Row, from_first_start
from placer.schedule import Plan, plan
from placer.schema import BatchOptions, Profile

WARM_UPS = 2
"""Runs before the measured one: a shape is recorded when it comes for the second time."""

AnyPipeline = TrainingPipeline | InferencePipeline


def measure(
    settings: Settings,
    placed: PlacedModel,
    calls: PlacedCalls,
    inputs: Any,
    target: Any,
    step: TrainStep | None,
    chunks: int | None,
    profile: Profile | None,
    compile: bool | Backend,
    batch_options: BatchOptions | None,
) -> Measurement:
    """Measure a training step or a stream of a flow; see ``DataFlow.measure`` for the rest.

    Args:
        settings: of the flow.
        placed: of the flow.
        calls: of the flow.
        inputs: a batch.
        target: the target of a training step.
        step: the training step; None for inference.
        chunks: micro-batches; the flow's if None.
        profile: the prediction is made from it; None for no prediction.
        compile: in inference, as for a stream.
        batch_options: in inference, where the samples lie; the flow's if None.
    """
    settings.refuse_resting("flow.measure")
    if step is None and target is not None:
        raise InputError(
            "to measure a training step give its target and step=; for inference, neither"
        )
    is_asked = chunks is not None
    chunks = settings.chunks if chunks is None else chunks
    require_chunks(chunks)
    if profile is not None and not isinstance(profile, Profile):
        raise InputError(
            f"profile is {kind_of(profile)}; give the Profile, such as profile() returned"
        )
    backend = backend_of(compile)
    if step is not None:
        _require_step_of(step, placed)
        _refuse_step_options(compile, backend, batch_options)
    options = settings.batch_options if batch_options is None else batch_options
    require_batch_options(options)
    declared = options if step is None else step.loss_fn.options
    samples = input_layout(placed.module, inputs, declared).size
    if is_asked:
        require_samples_for_chunks(chunks, samples)
    if step is not None:
        return _measure_step(step, inputs, target, chunks, profile)
    return _measure_stream(
        placed, calls, settings.output_device, inputs, chunks, options, profile, backend
    )


def _require_step_of(step: Any, placed: PlacedModel) -> None:
    if not isinstance(step, TrainStep):
        raise InputError(f"step is {kind_of(step)}; give what this flow's train_step(...) returned")
    if step.placed is not placed:
        raise InputError("step is one of another flow; give one that this flow's train_step made")


def _refuse_step_options(
    compile: bool | Backend, backend: Backend | None, batch_options: BatchOptions | None
) -> None:
    """Raise an InputError if ``measure`` was given options that the step has already."""
    if backend is not None:
        raise InputError(
            f"compile={compile!r} with step=: a step runs as train_step(compile=...) made it; "
            "leave it out here"
        )
    if batch_options is not None:
        raise InputError(
            "batch_options with step=: a step has the options that train_step was given; "
            "leave them out here"
        )


def _measure_step(
    step: TrainStep, inputs: Any, target: Any, chunks: int, profile: Profile | None
) -> Measurement:
    """Measure the forward and backward passes of a training step.

    Raises:
        InputError: the model runs through hooks, the profile is of other layers, gradients of an
            earlier step wait, or there is a profile and replicas have unlike shares.
    """
    if step.placed.gradients_wait:
        raise InputError(
            "gradients of a step with update=False wait for the next step, and a measurement would "
            "overwrite them: measure after a step that updates"
        )
    pipeline, tensors, goals = step.pipeline(inputs, target, chunks)
    if pipeline is None:
        raise _not_captured(step.placed)
    shares = pipeline.recipe.replication.samples
    if profile is not None and len(set(shares)) > 1:
        raise InputError(
            f"pipelines of replicas take {', '.join(map(str, shares))} samples of a micro-batch, "
            "and a profile has the times of one number of samples; leave profile out to measure "
            "without a prediction, or give replicas equal shares"
        )
    with restored(pipeline.graph, pipeline.lanes):
        pipeline.prepare(tensors, goals)
        for _ in range(WARM_UPS):
            pipeline.run(tensors, goals)
        rows = _traced([pipeline], pipeline.courier, [], lambda: pipeline.run(tensors, goals))
    cut = "one micro-batch" if pipeline.chunks == 1 else f"{pipeline.chunks} micro-batches"
    if pipeline.pipelines > 1:
        cut += f" in {pipeline.pipelines} parts" + " each" * (pipeline.chunks > 1)
    title = f"Training step of {pipeline.graph.model}: {cut}, {step.schedule}"
    order = plan_of_stages(pipeline)
    return _measurement(
        title, pipeline.stages, rows, order, profile, pipeline.sizes[0], pipeline.pipelines
    )


def _measure_stream(
    placed: PlacedModel,
    calls: PlacedCalls,
    target: torch.device,
    inputs: Any,
    chunks: int,
    options: BatchOptions,
    profile: Profile | None,
    backend: Backend | None,
) -> Measurement:
    """Measure a batch in inference, its micro-batches streamed to ``target``.

    Raises:
        InputError: the flow is not placed, the model runs through hooks, or the profile is of other
            layers.
    """
    if placed.assignment is None:
        raise InputError("the flow is not placed yet: call update_flow() before it is measured")
    streams = calls.streams
    found = calls.cut(
        input_forms.call_arguments(inputs),
        options,
        partial(even_sizes, chunks=chunks),
        lambda size: None,
    )
    given = [part.inputs.unflatten(part.tensors) for part in found.parts]
    batches = [kwargs if kwargs else args for args, kwargs in given]

    def run() -> None:
        for _ in streams.open(batches, None, backend, options, has_turns=False):
            pass

    kept = Kept(
        placed.module.buffers(),
        {devices.location(tensor) for tensor in placed.module.parameters()},
    )
    kept.save()
    try:
        if placed.captured(found.parts[0]) is None:
            # If the inputs are wrong, the layer that cannot take them raises a better error.
            run()
            raise _not_captured(placed)
        for _ in range(WARM_UPS):
            run()
        rows = _traced(streams.pipelines(), streams.courier, [target], run)
    finally:
        kept.restore()
    pipeline = streams.pipelines()[-1]
    places = {stage.device: index for index, stage in enumerate(pipeline.stages)}
    order = plan(
        "fill-drain",
        [places[stage.device] for stage in pipeline.stages],
        len(batches),
        training=False,
    )
    cut = "one micro-batch" if len(batches) == 1 else f"a stream of {len(batches)} micro-batches"
    title = f"Inference of {pipeline.graph.model}: {cut}"
    return _measurement(title, pipeline.stages, rows, order, profile, found.sizes[0])


def _measurement(
    title: str,
    stages: Sequence[Stage[Any]],
    rows: tuple[Row, ...],
    order: Plan,
    profile: Profile | None,
    size: int,
    pipelines: int = 1,
) -> Measurement:
    parts = [stage.segment for stage in stages]
    notes = [
        f"segment {index} on {stage.device} runs without a CUDA graph: {stage.not_recorded_because}"
        for index, stage in enumerate(stages)
        if stage.not_recorded_because
    ]
    for index, stage in enumerate(stages):
        if stage.compiled:
            notes.append(f"segment {index} on {stage.device} is compiled: {stage.compiled}")
        elif stage.not_compiled_because:
            notes.append(
                f"segment {index} on {stage.device} is not compiled: {stage.not_compiled_because}"
            )
    if parts[0].device.type == devices.CPU:
        notes.append(
            "stand-ins on one processor run one after another: devices would have less idle time"
        )
    if profile is not None and profile.batch_size != size:
        notes.append(
            f"the profile is of micro-batches of {profile.batch_size}, these are of {size}"
        )
    if profile is not None and pipelines > 1:
        notes.append(
            "the prediction leaves out the exchange of gradients and parameters between replicas"
        )
    names = tuple(dict.fromkeys(str(part.device) for part in parts))
    guess = () if profile is None else predicted(profile, parts, order, pipelines)
    return Measurement(title, names, rows, guess, tuple(notes))


def _traced(
    pipelines: Sequence[AnyPipeline],
    courier: Courier,
    homes: Sequence[torch.device],
    run: Callable[[], Any],
) -> tuple[Row, ...]:
    """Return the passes and copies that are issued while something runs, by start.

    Results go to ``homes``.
    """
    places = list(
        dict.fromkeys(stage.device for pipeline in pipelines for stage in pipeline.stages)
    )
    passes: list[Issued] = []
    deliveries: list[Delivery] = []
    clock = Clock([*places, *homes])
    try:
        courier.trace = deliveries
        for pipeline in pipelines:
            pipeline.engine.trace = passes
        run()
    finally:
        courier.trace = None
        for pipeline in pipelines:
            pipeline.engine.trace = None
        for place in places:
            devices.synchronise(place)
    stages = [stage.device for stage in pipelines[-1].stages]
    transfers = [_transfer(item, stages, clock) for item in deliveries]
    return from_first_start([_pass(item, clock) for item in passes] + transfers)


def _pass(item: Issued, clock: Clock) -> Row:
    device, stage, phase, number, began, ended = item
    return Row(
        str(device), phase, stage, None, number, clock.ms(began, device), clock.ms(ended, device)
    )


def _transfer(item: Delivery, stages: Sequence[torch.device], clock: Clock) -> Row:
    """Return the row of a copy between stages, whose devices are ``stages``.

    A copy without a source comes from the caller, one without a target goes to it.
    """
    source, target, phase, number = item.label
    kind: Kind = "gradients" if phase == "backward" else "values"
    if source is None:
        kind = "inputs"
    elif target is None:
        kind = "results"
    here = item.source if source is None else stages[source]
    there = item.target if target is None else stages[target]
    began_ms, ended_ms = clock.ms(item.began, item.clock), clock.ms(item.ended, item.clock)
    return Row(f"{here} → {there}", kind, source, target, number, began_ms, ended_ms)


def _not_captured(placed: PlacedModel) -> InputError:
    reason = placed.not_captured_because
    if not reason:
        return InputError(
            "micro-batches run one after another, so that there is no pipeline to measure: a layer "
            "reads a number that another took from a tensor, or the step has warned of another "
            "reason"
        )
    return InputError(f"the model runs through hooks, so it has no segments to measure: {reason}")
