"""How jobs end that end otherwise than with the solver's placement."""

from __future__ import annotations

import json

from placer.schema import Placement

from ..problem import Problem
from ..workers.worker import Crashed, Killed, Missing, Refused
from .job import Job


class Elsewhere(Exception):
    """Another replica solves the job."""


def nothing_found(job: Job) -> bytes:
    """The Placement, as JSON, of a job that was stopped before the solver had one."""
    placement = Placement(
        id=job.question.id, status="unknown", objective=job.question.objective, method="stopped before any was found"
    )
    return placement.model_dump_json().encode()


def problem_of(error: Exception) -> Problem:
    """What is told of a job that failed."""
    if isinstance(error, Refused):
        return Problem(422, "invalid-request", "The request cannot be used", str(error))
    if isinstance(error, Missing):
        return Problem(501, "missing-package", "This service lacks a package", str(error))
    if isinstance(error, Killed | Crashed):
        detail = f"the solver failed on this request: {error}. Other requests are not touched; asking again tries again"
        return Problem(500, "solver-failed", "The solver failed", detail)
    return Problem(500, "solver-failed", "The solver failed", f"the worker could not be run: {error}")


def stopping() -> Problem:
    """What is told of a job that comes too late."""
    detail = "the service is stopping; ask again in a moment"
    return Problem(503, "stopping", "The service is stopping", detail, headers={"Retry-After": "5"})


def queue_full(what: str, seconds: int) -> Problem:
    """There is no room for one more, and when there may be."""
    detail = f"{what}; try again in {seconds} s"
    return Problem(429, "queue-full", "The queue is full", detail, headers={"Retry-After": str(seconds)})


def is_proven(job: Job) -> bool:
    """Whether no longer solve would find anything else."""
    return job.solved is not None and json.loads(job.solved.summary)["status"] in ("optimal", "infeasible")


def gap_of(job: Job) -> float | None:
    """The gap of the placement that was found, if one was."""
    gap: float | None = json.loads(job.solved.summary)["gap"] if job.solved is not None else None
    return gap


def how_it_ended(job: Job) -> str:
    """For the metrics."""
    if job.problem is not None:
        return "failed"
    if job.elsewhere:
        return "elsewhere"
    return "stopped" if job.stopped else "answered"


def told_of(job: Job) -> dict[str, str | int]:
    """For its span."""
    error = {"error": job.problem.title} if job.problem is not None else {}
    return {"placer.ended": how_it_ended(job), "placer.starts": job.starts, **error}
