"""The predicted timeline of a batch: when each device works on which micro-batch, and what passes
between devices.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from placer.schema.base import SCHEMA_VERSION, Name, Schedule, Wire

Time = Annotated[float, Field(ge=0)]


class TimelinePass(Wire):
    """One pass of one micro-batch through one stage.

    Attributes:
        device: where it runs.
        stage: from 0, in pipeline order; a device may have several.
        phase: ``weights`` is the part of a backward pass that zero-bubble schedules do later.
        micro_batch: from 0.
        start_ms: from the start of the batch.
        end_ms: from the same.
    """

    device: Name
    stage: Annotated[int, Field(ge=0)]
    phase: Literal["forward", "backward", "weights"]
    micro_batch: Annotated[int, Field(ge=0)]
    start_ms: Time
    end_ms: Time


class TimelineCopy(Wire):
    """What one device sends to another for one micro-batch.

    Attributes:
        source: the device that sends.
        target: the device that receives.
        source_stage: the stage that sends.
        target_stage: the stage that receives.
        carries: values, or their gradients.
        micro_batch: from 0.
        start_ms: from the start of the batch.
        end_ms: from the same.
    """

    source: Name
    target: Name
    source_stage: Annotated[int, Field(ge=0)]
    target_stage: Annotated[int, Field(ge=0)]
    carries: Literal["values", "gradients"]
    micro_batch: Annotated[int, Field(ge=0)]
    start_ms: Time
    end_ms: Time


class DeviceTime(Wire):
    """How a device spends a batch.

    Attributes:
        device: its name.
        busy_ms: it computes passes.
        idle_ms: it waits, from the first pass of the batch to the last one on any device: the
            bubble.
        optimizer_ms: its optimizer's step, after the last pass on any device.
    """

    device: Name
    busy_ms: Time
    idle_ms: Time
    optimizer_ms: Time = 0.0


class Timeline(Wire):
    """A batch as the schedule has it, simulated from the profile's times.

    Attributes:
        id: of the placement.
        schedule: the order of micro-batches.
        training: whether there are backward passes.
        chunks: micro-batches in a batch.
        shown_chunks: micro-batches in the batch that is simulated: fewer, where all are too many to
            be shown.
        step_ms: from the start of the first pass to the end of the last optimizer's step. Of
            objective ``step`` it is the placement's ``step.alone_ms``, unless fewer micro-batches
            are shown.
        single_device_ms: the shown micro-batches one after another and the optimizer's step, on the
            best single device; None if the placement names no such device.
        bubble: the share of the devices' time that is idle while micro-batches run, from 0 to 1.
        devices: those that hold layers, in pipeline order.
        passes: by start.
        copies: by start.
    """

    schema_version: Literal["1"] = SCHEMA_VERSION
    id: str = ""
    schedule: Schedule
    training: bool
    chunks: Annotated[int, Field(ge=1)]
    shown_chunks: Annotated[int, Field(ge=1)]
    step_ms: Time
    single_device_ms: Time | None = None
    bubble: Annotated[float, Field(ge=0, le=1)]
    devices: tuple[DeviceTime, ...]
    passes: tuple[TimelinePass, ...]
    copies: tuple[TimelineCopy, ...] = ()
