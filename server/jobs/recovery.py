"""Recovery of the best placement of a solve whose worker was killed."""

from __future__ import annotations

import logging

from ..settings import Settings
from ..workers.solving import RecoveredSolver, Solved, SolveTask
from ..workers.worker import Crashed, Killed, Refused, Worker
from .job import SolveJob

log = logging.getLogger("placer_server")

# Time limit of a recovery in seconds; 20,000 layers take 2 s.
RECOVERY_S = 30.0


def recovers(job: SolveJob, error: Exception, settings: Settings) -> bool:
    """Recover the answer of a job whose worker was killed, and return whether it has one.

    The answer is the best placement that the worker reported. A stopped job may also have none.

    Args:
        job: Job with the reported placement in ``best``; its ``solved`` is set.
        error: How the worker ended.
        settings: Limits of the worker that checks the placement.
    """
    job.solved = _checked(job, str(error), settings) if job.best is not None else None
    job.recovered = job.solved is not None
    return job.recovered or (job.stopped and isinstance(error, Killed))


def _checked(job: SolveJob, reason: str, settings: Settings) -> Solved | None:
    """Return the reported placement after a check in a worker, or None if it is invalid."""
    assert job.best is not None
    job.worker = Worker(
        SolveTask(RecoveredSolver(job.best, reason), job.id),
        job.payload,
        limit_s=RECOVERY_S,
        grace_s=settings.stop_grace_s,
        memory_bytes=settings.worker_memory_bytes,
    )
    try:
        solved: Solved = job.worker.run()
    except (Refused, Crashed, Killed) as error:
        log.error("the best placement of solve %s cannot be used: %s", job.id, error)
        return None
    log.warning("solve %s is answered with its best placement so far: %s", job.id, reason)
    return solved
