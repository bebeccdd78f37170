"""The predicted timeline of a batch: passes on devices, and transfers between them."""

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
        phase: ``weights`` is a weight-gradient pass, which zero-bubble schedules defer.
        micro_batch: from 0.
        start_ms: since the start of the batch.
        end_ms: since the start of the batch.
    """

    device: Name
    stage: Annotated[int, Field(ge=0)]
    phase: Literal["forward", "backward", "weights"]
    micro_batch: Annotated[int, Field(ge=0)]
    start_ms: Time
    end_ms: Time


class TimelineCopy(Wire):
    """A transfer between two devices for one micro-batch.

    Attributes:
        source: the device that sends.
        target: the device that receives.
        source_stage: the stage that sends.
        target_stage: the stage that receives.
        carries: values, or their gradients.
        micro_batch: from 0.
        start_ms: since the start of the batch.
        end_ms: since the start of the batch.
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
    """How a device spends the time of a batch.

    Attributes:
        device: its name.
        busy_ms: time of its passes.
        idle_ms: waiting time between the first and the last pass of the batch on any device: the
            bubble.
        optimizer_ms: time of its optimizer step, after the last pass on any device.
    """

    device: Name
    busy_ms: Time
    idle_ms: Time
    optimizer_ms: Time = 0.0


class Timeline(Wire):
    """A batch simulated from the profile's times.

    Attributes:
        id: of the placement.
        schedule: the order of micro-batches.
        training: whether there are backward passes.
        chunks: micro-batches in a batch.
        shown_chunks: micro-batches in the simulated batch; fewer if all are too many to show.
        step_ms: from the start of the first pass to the end of the last optimizer step. Under the
            objective ``step``, it equals the placement's ``step.isolated_ms`` unless fewer
            micro-batches are shown.
        single_device_ms: time of the shown micro-batches and the optimizer step on the best single
            device; None if the placement names no such device.
        bubble: the idle share of the devices' time while micro-batches run, from 0 to 1.
        devices: the devices that hold layers, in pipeline order.
        passes: ordered by start.
        copies: ordered by start.
    """

    schema_version: Literal["3"] = SCHEMA_VERSION
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
