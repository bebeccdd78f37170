"""The best of a solve whose worker was killed, looked over in another one."""

from __future__ import annotations

import logging

from ..settings import Settings
from ..workers.rescued import Rescued
from ..workers.solving import Solved, SolveTask
from ..workers.worker import Crashed, Killed, Refused, Worker
from .job import Job

log = logging.getLogger("placer_server")

RESCUE_S = 30.0
"""So long that may take; of 20,000 layers it takes 2 s."""


def is_rescued(job: Job, error: Exception, settings: Settings) -> bool:
    """Whether a job has an answer after its worker was killed: the best that it told, or, if it was
    stopped, none.

    Args:
        job: whose ``best`` it is; ``solved`` is set to it.
        error: how its worker ended.
        settings: of workers.
    """
    job.solved = _looked_over(job, str(error), settings) if job.best is not None else None
    job.rescued = job.solved is not None
    return job.rescued or (job.stopped and isinstance(error, Killed))


def _looked_over(job: Job, why: str, settings: Settings) -> Solved | None:
    """The best that was told; None if it is not what it said."""
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
