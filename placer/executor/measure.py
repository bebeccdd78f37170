"""``DataFlow.measure``: one batch with a mark before and behind every pass and every copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from placer import devices
from placer.capture import input_forms
from placer.devices import Clock, Courier, Delivery
from placer.errors import InputError
from placer.executor.engine.compiled_segments import Backend
from placer.executor.engine.fill_drain import even_sizes
from placer.executor.engine.pass_trace import Issued
from placer.executor.engine.stage import Stage
from placer.executor.inference.stream_pipeline import InferencePipeline
from placer.executor.placed_calls import PlacedCalls
from placer.executor.placed_model import PlacedModel
from placer.executor.predict import predicted
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


def measure_step(
    step: TrainStep,
    inputs: Any,
    target: Any,
    chunks: int | None = None,
    profile: Profile | None = None,
) -> Measurement:
    """Measure the forward and backward passes of a training step.

    The optimizer does not step, and buffers are restored.

    Args:
        step: from ``DataFlow.train_step``.
        inputs: as for a step.
        target: as for a step.
        chunks: as for a step.
        profile: the prediction is made from it; None for no prediction.

    Raises:
        InputError: the model runs through hooks, the profile is of other layers, gradients of an
            earlier step wait, or there is a profile and stages are replicated.
    """
    if step.placed.gradients_wait:
        raise InputError(
            "gradients of a step with update=False wait for the next step, and a measurement would "
            "overwrite them: measure after a step that updates"
        )
    pipeline, tensors, goals = step.pipeline(inputs, target, chunks)
    if pipeline is None:
        raise _not_captured(step.placed)
    if profile is not None and pipeline.pipelines > 1:
        raise InputError(
            "the timeline of replicated stages is not predicted; leave profile out to measure it"
        )
    with restored(pipeline.graph, pipeline.lanes):
        pipeline.prepare(tensors, goals)
        for _ in range(WARM_UPS):
            pipeline.run(tensors, goals)
        rows = _traced([pipeline], pipeline.courier, [], lambda: pipeline.run(tensors, goals))
    cut = "one micro-batch" if pipeline.chunks == 1 else f"{pipeline.chunks} micro-batches"
    title = f"Training step of {pipeline.graph.model}: {cut}, {step.schedule}"
    return _measurement(title, pipeline.stages, rows, pipeline.plan, profile, pipeline.sizes[0])


def measure_stream(
    placed: PlacedModel,
    calls: PlacedCalls,
    target: torch.device,
    inputs: Any,
    chunks: int,
    options: BatchOptions,
    profile: Profile | None = None,
    backend: Backend | None = None,
) -> Measurement:
    """Measure a batch in inference, its micro-batches streamed.

    Args:
        placed: the model.
        calls: of the model.
        target: the device of the results.
        inputs: one tensor, a tuple of positional or a dict of keyword arguments.
        chunks: micro-batches.
        options: what was declared of the batch.
        profile: the prediction is made from it; None for no prediction.
        backend: of ``torch.compile``; None to compile nothing.

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
    names = tuple(dict.fromkeys(str(part.device) for part in parts))
    guess = () if profile is None else predicted(profile, parts, order)
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
