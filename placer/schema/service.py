"""Types of the service alone: progress, past solves, batches of requests, predicted timelines."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from placer.schema.base import SCHEMA_VERSION, Name, Objective, Schedule, Status, Wire
from placer.schema.placement import Placement

MAX_REQUESTS = 64
"""Requests of a batch."""

Time = Annotated[float, Field(ge=0)]


class Progress(Wire):
    """The progress of an unfinished solve.

    Attributes:
        id: of the future placement.
        status: whether it waits for a worker or runs.
        incumbent: the best objective value so far, ms or bytes; None without one.
        bound: the proven lower bound so far; None without one.
        gap: (incumbent - bound) / incumbent; None without both.
        elapsed_s: seconds since the request.
    """

    id: str
    status: Literal["queued", "running"]
    incumbent: float | None = None
    bound: float | None = None
    gap: float | None = None
    elapsed_s: Annotated[float, Field(ge=0)] = 0.0


class Summary(Wire):
    """A placement in a list.

    Attributes:
        id: of the placement.
        profile_id: of its profile, for ``/v1/profiles/{id}``; None if it is not stored.
        complete: whether the answer is proven, or the solver was not stopped early.
        version: of the Placer that made it.
        created_s: seconds since 1970.
        model: its name.
        layers: number of layers.
        devices: number of available devices.
        used_devices: number of devices that hold layers.
        status: see ``Placement``, as for all further fields.
    """

    id: str
    profile_id: str | None
    complete: bool
    version: str
    created_s: float
    model: str = ""
    layers: int | None = None
    devices: int | None = None
    used_devices: int | None = None
    status: Status | None = None
    objective: Objective | None = None
    objective_value: float | None = None
    gap: float | None = None
    training: bool | None = None
    chunks: int | None = None


class PlacementPage(Wire):
    """A page of past placements, newest first.

    Attributes:
        placements: of this page.
        next: the cursor of the next page; None on the last page.
    """

    placements: tuple[Summary, ...]
    next: str | None = None


class Batch(Wire):
    """Requests that are sent together and answered independently.

    Attributes:
        shared: default fields of every request, usually the profile.
        requests: each a PlacementRequest after ``shared`` is filled in.
    """

    schema_version: Literal["3"] = SCHEMA_VERSION
    shared: dict[str, Any] = {}
    requests: Annotated[tuple[dict[str, Any], ...], Field(min_length=1, max_length=MAX_REQUESTS)]


class BatchAnswer(Wire):
    """The answer to one request of a batch.

    Attributes:
        status: the HTTP status of the same request by itself: 200, 202, 422, 429, ...
        id: of the placement; None if the request is invalid.
        placement: the answer; None until there is one.
        progress: the state of an unfinished solve.
        problem: why there is no answer: an RFC 9457 problem.
        retry_after_s: seconds to wait before another attempt, if that may help.
    """

    status: int
    id: str | None = None
    placement: Placement | None = None
    progress: Progress | None = None
    problem: dict[str, Any] | None = None
    retry_after_s: float | None = None


class BatchAnswers(Wire):
    """The answers of a batch, in the order of its requests."""

    answers: tuple[BatchAnswer, ...]


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

    Of equal pipelines it has the first one. Where stages have different numbers of replicas, it has
    all devices, and every micro-batch here is a unit: the part that one replica computes at a time.

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
