"""Evaluations in worker processes, a few at a time."""

from __future__ import annotations

import asyncio
import pickle

from ..problem import Problem
from ..settings import Settings
from ..shares import Shares
from ..workers.worker import Crashed, Killed, Refused, Task, Worker
from .evaluation import Asking

AT_ONCE = 2
MOST_WAITING = 32
LIMIT_S = 30.0


class Judge:
    """Runner of evaluations, with a queue of its own so that they do not wait for solves."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._free = asyncio.Semaphore(AT_ONCE)
        self._shares = Shares(
            AT_ONCE + MOST_WAITING, settings.client_share, "evaluations run or wait", retry_s=1
        )

    async def judge(self, task: Task[bytes | Problem], asking: Asking, client: str) -> bytes:
        """Run an evaluation, and return its result.

        Raises:
            Problem: The body is invalid, too many evaluations wait, or the evaluation failed.
        """
        with self._shares.held(client):
            async with self._free:
                return await self._run(task, asking)

    async def _run(self, task: Task[bytes | Problem], asking: Asking) -> bytes:
        settings = self._settings
        worker = Worker(
            task,
            pickle.dumps(asking),
            lambda *_: None,
            limit_s=LIMIT_S,
            grace_s=0.0,
            memory_bytes=settings.worker_memory_bytes,
        )
        try:
            result = await asyncio.to_thread(worker.run)
        except Refused as error:
            raise Problem(
                422, "invalid-request", "The request cannot be used", str(error)
            ) from error
        except (Crashed, Killed) as error:
            detail = f"the map could not be judged: {error}. Other requests are not touched"
            raise Problem(500, "not-judged", "Judging failed", detail) from error
        if isinstance(result, Problem):
            raise result
        return result
