"""Several requests in one exchange with the service, and their answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from placer.schema.base import SCHEMA_VERSION, Wire
from placer.schema.history import Progress
from placer.schema.placement import Placement

MAX_REQUESTS = 64


class Batch(Wire):
    """Requests that are sent together and answered independently.

    Attributes:
        shared: default fields of every request, usually the profile.
        requests: each a PlacementRequest after ``shared`` is filled in.
    """

    schema_version: Literal["2"] = SCHEMA_VERSION
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
