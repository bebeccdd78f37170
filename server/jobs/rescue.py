"""Recovery of the best placement of a solve whose worker was killed."""

from __future__ import annotations

import logging

from ..settings import Settings
from ..workers.rescued import Rescued
from ..workers.solving import Solved, SolveTask
from ..workers.worker import Crashed, Killed, Refused, Worker
from .job import Job

log = logging.getLogger("placer_server")

# Time limit of a recovery in seconds; 20,000 layers take 2 s.
RESCUE_S = 30.0


def is_rescued(job: Job, error: Exception, settings: Settings) -> bool:
    """Return whether a job has an answer although its worker was killed.

    The answer is the best placement that the worker reported. A stopped job may also have none.

    Args:
        job: Job with the reported placement in ``best``; its ``solved`` is set.
        error: How the worker ended.
        settings: Limits of the worker that checks the placement.
    """
    job.solved = _looked_over(job, str(error), settings) if job.best is not None else None
    job.rescued = job.solved is not None
    return job.rescued or (job.stopped and isinstance(error, Killed))


def _looked_over(job: Job, why: str, settings: Settings) -> Solved | None:
    """Return the reported placement after a check in a worker, or None if it is invalid."""
    assert job.best is not None
    job.worker = Worker(
        SolveTask(Rescued(job.best, why)),
        job.payload,
        lambda *_: None,
        limit_s=RESCUE_S,
        grace_s=settings.stop_grace_s,
        memory_bytes=settings.worker_memory_bytes,
    )
    try:
        solved: Solved = job.worker.run()
    except (Refused, Crashed, Killed) as error:
        log.error("the best so far of solve %s cannot be used: %s", job.question.id, error)
        return None
    log.warning("solve %s is answered with the best so far: %s", job.question.id, why)
    return solved
