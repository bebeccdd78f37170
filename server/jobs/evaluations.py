"""Runner of evaluations of maps that users made, a few at a time.

A client waits for each evaluation, and nothing is stored, so an evaluation is not a job.
"""

from __future__ import annotations

import asyncio
import pickle

from ..judge.evaluation import EvaluationInput
from ..problem import Problem
from ..quota import Quota
from ..settings import Settings
from ..workers.worker import Crashed, Killed, Refused, Task, Worker

AT_ONCE = 2
MAX_WAITING = 32
LIMIT_S = 30.0


class Evaluations:
    """Runner of evaluations, with a queue of its own so that they do not wait for solves."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._free = asyncio.Semaphore(AT_ONCE)
        self._quota = Quota(AT_ONCE + MAX_WAITING, settings.client_share, "evaluations", retry_s=1)

    async def run(self, task: Task[bytes | Problem], given: EvaluationInput, client: str) -> bytes:
        """Run an evaluation, and return its result.

        Raises:
            Problem: The body is invalid, too many evaluations wait, or the evaluation failed.
        """
        worker = Worker(
            task,
            pickle.dumps(given),
            limit_s=LIMIT_S,
            grace_s=0.0,
            memory_bytes=self._settings.worker_memory_bytes,
        )
        with self._quota.held(client):
            async with self._free:
                try:
                    result = await asyncio.to_thread(worker.run)
                except Refused as error:
                    title = "The request cannot be used"
                    raise Problem(422, "invalid-request", title, str(error)) from error
                except (Crashed, Killed) as error:
                    detail = (
                        f"the map could not be evaluated: {error}. Other requests are unaffected"
                    )
                    raise Problem(500, "not-judged", "The evaluation failed", detail) from error
        if isinstance(result, Problem):
            raise result
        return result
