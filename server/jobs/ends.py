"""Outcomes of jobs: what is stored and what clients see."""

from __future__ import annotations

import json
import logging

import placer
from placer.schema import Placement

from ..problem import Problem, defect
from ..settings import Settings
from ..store.database import StoreError
from ..store.store import Answer, Asked, Store
from ..workers.worker import Crashed, Killed, Missing, Refused
from .job import Job
from .question import Question

log = logging.getLogger("placer_server")


class Elsewhere(Exception):
    """Another replica solves the job."""


def nothing_found(job: Job) -> bytes:
    """Return the Placement, as JSON, of a job that was stopped before the solver found one."""
    placement = Placement(
        id=job.question.id,
        status="unknown",
        objective=job.question.objective,
        method="stopped before any was found",
    )
    return placement.model_dump_json().encode()


def keep(job: Job, store: Store) -> None:
    """Store the job's answer, or keep the stored answer if an earlier solve found a better one."""
    assert job.answer is not None
    complete = is_proven(job) or not (job.stopped or job.handed_on or job.rescued)
    answer = Answer(job.answer, complete=complete, version=placer.__version__)
    if (solved := job.solved) is not None:
        summary, asked = solved.summary, Asked(solved.profile_id, solved.profile, solved.question)
    else:
        # No worker parsed the request, so its parts are unknown.
        summary, asked = (
            json.dumps({"status": "unknown", "objective": job.question.objective}).encode(),
            None,
        )
    try:
        kept = store.put(
            job.question.id, answer, summary, asked, settled=complete or not job.handed_on
        )
        job.answer = kept.placement
    except StoreError as error:
        log.error(
            "placement %s could not be written, and is kept in memory: %s", job.question.id, error
        )


def problem_of(error: Exception) -> Problem:
    """Return the problem of a job that failed."""
    if isinstance(error, Refused):
        return Problem(422, "invalid-request", "The request cannot be used", str(error))
    if isinstance(error, Missing):
        return Problem(501, "missing-package", "This service lacks a package", str(error))
    if isinstance(error, Killed | Crashed):
        way_out = "asking again tries again"
        if isinstance(error, Killed):
            way_out = "a coarser granularity is solved sooner, a longer PLACER_STOP_GRACE_S lets it tell what it found"
        detail = (
            f"the solver failed on this request: {error}. Other requests are not touched; {way_out}"
        )
        return Problem(500, "solver-failed", "The solver failed", detail)
    if isinstance(error, OSError):
        return Problem(
            500, "solver-failed", "The solver failed", f"the worker could not be run: {error}"
        )
    return defect()


def stopping() -> Problem:
    """Return the problem for a request that arrives while the service stops."""
    detail = "the service is stopping; ask again in a moment"
    return Problem(503, "stopping", "The service is stopping", detail, headers={"Retry-After": "5"})


def refuse_excess(question: Question, settings: Settings) -> None:
    """Reject a question that would occupy a worker, or cores, for longer than this service allows.

    The service does not solve it within smaller limits instead, since another service would then
    give
    a different answer.

    Raises:
        Problem: The question exceeds a limit.
    """
    bounds = {"time_limit_s": settings.max_time_limit_s, "workers": settings.max_solver_workers}
    variables = {"time_limit_s": "PLACER_MAX_TIME_LIMIT_S", "workers": "PLACER_MAX_SOLVER_WORKERS"}
    faults = [
        {
            "pointer": f"#/{name}",
            "detail": f"is {given:g}; this service allows at most {most:g} ({variables[name]})",
        }
        for name, most in bounds.items()
        if (given := getattr(question, name)) > most
    ]
    if faults:
        detail = "; ".join(
            f"{fault['pointer'].removeprefix('#/')} {fault['detail']}" for fault in faults
        )
        raise Problem(
            422, "over-limit", "The request asks for too much", f"{detail}: ask for less", faults
        )


def queue_full(what: str, seconds: int) -> Problem:
    """Return the problem for a full queue, with the seconds until there may be room."""
    detail = f"{what}; try again in {seconds} s"
    return Problem(
        429, "queue-full", "The queue is full", detail, headers={"Retry-After": str(seconds)}
    )


def is_proven(job: Job) -> bool:
    """Return whether a longer solve could not improve the answer."""
    return job.solved is not None and json.loads(job.solved.summary)["status"] in (
        "optimal",
        "infeasible",
    )


def gap_of(job: Job) -> float | None:
    """Return the gap of the placement that was found, or None."""
    gap: float | None = json.loads(job.solved.summary)["gap"] if job.solved is not None else None
    return gap


def how_it_ended(job: Job) -> str:
    """Return the label of the outcome in the metrics."""
    if job.problem is not None:
        return "failed"
    if job.elsewhere:
        return "elsewhere"
    if job.stopped:
        return "stopped"
    return "rescued" if job.rescued else "answered"


def told_of(job: Job) -> dict[str, str | int]:
    """Return the attributes of the outcome for the job's span."""
    error = {"error": job.problem.title} if job.problem is not None else {}
    return {"placer.ended": how_it_ended(job), "placer.starts": job.starts, **error}
