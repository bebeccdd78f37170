"""Types of the service alone: past solves, a running one's progress, and batches of requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from placer.schema.base import SCHEMA_VERSION, Objective, Status, Wire
from placer.schema.placement import Placement

MAX_REQUESTS = 64
"""Requests of a batch."""


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
