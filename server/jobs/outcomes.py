"""Outcomes of jobs: what is stored, and which problems clients see."""

from __future__ import annotations

import json
import logging

import placer
from placer.schema import Placement

from ..problem import Problem, defect, invalid_request
from ..settings import Settings
from ..store.database import StoreError
from ..store.store import Answer, Store, StoredQuestion
from ..workers.worker import Crashed, Killed, MemoryExceeded, MissingPackage, Refused
from .job import Question, SolveJob

log = logging.getLogger("placer_server")


def empty_placement(job: SolveJob) -> bytes:
    """Return the Placement, as JSON, of a job that was stopped before the solver found one."""
    placement = Placement(
        id=job.id,
        status="unknown",
        objective=job.question.objective,
        method="stopped before any was found",
    )
    return placement.model_dump_json().encode()


def store_answer(job: SolveJob, store: Store) -> None:
    """Store the job's answer, or take the stored answer if an earlier solve found a better one."""
    assert job.answer is not None
    complete = is_proven(job) or not (job.stopped or job.continues_later or job.recovered)
    answer = Answer(job.answer, complete=complete, version=placer.__version__)
    question = None
    if (solved := job.solved) is not None:
        summary, question = (
            solved.summary,
            StoredQuestion(solved.profile_id, solved.profile, solved.question),
        )
    else:
        # No worker parsed the request, so its parts are unknown.
        fields = {"status": "unknown", "objective": job.question.objective}
        summary = json.dumps(fields).encode()
    settled = complete or not job.continues_later
    try:
        job.answer = store.put(job.id, answer, summary, question, settled=settled).placement
    except StoreError as error:
        log.error("placement %s could not be written, and is kept in memory: %s", job.id, error)


def solve_problem(error: Exception) -> Problem:
    """Return the problem of a solve that failed."""
    title = "The solver failed"
    if isinstance(error, Refused):
        return invalid_request(str(error))
    if isinstance(error, MissingPackage):
        return Problem(501, "missing-package", "This service lacks a package", str(error))
    if isinstance(error, Killed | Crashed):
        remedy = "ask again to try again"
        if isinstance(error, Killed):
            remedy = (
                "profile with a coarser granularity, or set a longer PLACER_STOP_GRACE_S so that"
                " the solver can return what it found"
            )
        detail = f"the solver failed on this request: {error}. Other requests are unaffected; "
        return Problem(500, "solver-failed", title, detail + remedy)
    if isinstance(error, OSError):
        return Problem(500, "solver-failed", title, f"the worker could not be started: {error}")
    return defect()


def graph_problem(error: Exception, verb: str, limit_s: str, memory_bytes: int) -> Problem:
    """Return the problem of a graph that could not be measured or estimated.

    Args:
        error: How the worker ended.
        verb: ``measure`` or ``estimate``.
        limit_s: Time limit of the worker with its unit, and with its setting if it has one.
        memory_bytes: Memory limit of the worker.
    """
    done = f"{verb}d"
    if isinstance(error, MissingPackage):
        return Problem(501, f"cannot-{verb}", f"This node cannot {verb}", str(error))
    if isinstance(error, Refused):
        return Problem(422, "invalid-graph", f"The graph cannot be {done}", str(error))
    if isinstance(error, Killed):
        detail = f"the graph took more than {limit_s}; send a smaller graph"
        return Problem(422, "too-slow", "The graph takes too long", detail)
    if isinstance(error, MemoryExceeded):
        limit = (
            f"{memory_bytes} bytes (PLACER_PROFILE_MEMORY_BYTES)" if memory_bytes else "there is"
        )
        detail = f"the graph needs more memory than {limit}; send a smaller graph"
        return Problem(422, "too-large", "The graph takes too much memory", detail)
    detail = (
        f"the graph could not be {done}: {error}. Other requests are unaffected; ask again to try"
        " again"
    )
    return Problem(500, f"not-{done}", f"The graph could not be {done}", detail)


def stopping() -> Problem:
    """Return the problem for a request that arrives while the service stops."""
    detail = "the service is stopping, and its next start continues accepted jobs; ask again then"
    return Problem(503, "stopping", "The service is stopping", detail, retry_s=5)


def check_limits(question: Question, settings: Settings) -> None:
    """Reject a question that would occupy a worker, or cores, for longer than this service allows.

    The service does not solve it within smaller limits instead, since another service would then
    give a different answer.

    Raises:
        Problem: The question exceeds a limit.
    """
    limits = {"time_limit_s": settings.max_time_limit_s, "workers": settings.max_solver_workers}
    variables = {"time_limit_s": "PLACER_MAX_TIME_LIMIT_S", "workers": "PLACER_MAX_SOLVER_WORKERS"}
    faults = [
        {
            "pointer": f"#/{name}",
            "detail": f"is {given:g}; this service allows at most {limit:g} ({variables[name]})",
        }
        for name, limit in limits.items()
        if (given := getattr(question, name)) > limit
    ]
    if faults:
        detail = "; ".join(
            f"{fault['pointer'].removeprefix('#/')} {fault['detail']}" for fault in faults
        )
        raise Problem(
            422, "over-limit", "The request asks for too much", f"{detail}: ask for less", faults
        )


def is_proven(job: SolveJob) -> bool:
    """Return whether a longer solve could not improve the answer."""
    return job.solved is not None and json.loads(job.solved.summary)["status"] in (
        "optimal",
        "infeasible",
    )


def gap_of(job: SolveJob) -> float | None:
    """Return the gap of the placement that was found, or None."""
    gap: float | None = json.loads(job.solved.summary)["gap"] if job.solved is not None else None
    return gap


def outcome_label(job: SolveJob) -> str:
    """Return the label of the outcome in the metrics."""
    if job.problem is not None:
        return "failed"
    if job.elsewhere:
        return "elsewhere"
    if job.stopped:
        return "stopped"
    return "rescued" if job.recovered else "answered"
