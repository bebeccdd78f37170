"""Many questions in one exchange with the service, and their answers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from placer.schema.base import SCHEMA_VERSION, Wire
from placer.schema.history import Progress
from placer.schema.placement import Placement

MAX_REQUESTS = 64


class Batch(Wire):
    """Questions that are asked together, each answered by itself.

    Attributes:
        shared: fields that every request has which does not say otherwise: the profile, as a rule.
        requests: each a PlacementRequest once ``shared`` is filled in.
    """

    schema_version: str = SCHEMA_VERSION
    shared: dict[str, Any] = {}
    requests: Annotated[tuple[dict[str, Any], ...], Field(min_length=1, max_length=MAX_REQUESTS)]


class BatchAnswer(Wire):
    """What became of one question of a batch.

    Attributes:
        status: the HTTP status that it would have been answered with alone: 200, 202, 422, 429, ...
        id: of the placement; None where the question has a fault.
        placement: the answer; None while there is none.
        progress: how far the solve is that goes on.
        problem: why there is no answer: an RFC 9457 problem.
        retry_after_s: when to ask again, where that may help.
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
