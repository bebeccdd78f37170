"""Runner of estimates of graphs that clients send, one at a time.

A client waits for each estimate, and nothing is stored, so an estimate is not a job.
"""

from __future__ import annotations

import asyncio

from ..problem import Problem
from ..quota import Quota
from ..settings import MAX_WAIT_S, Settings
from ..workers.estimating import estimate_graph
from ..workers.worker import Crashed, Killed, MissingPackage, Refused, Worker
from .outcomes import graph_problem

MAX_WAITING = 8


class Estimates:
    """Runner of estimates, with a queue of its own so that they do not wait for solves."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._free = asyncio.Semaphore(1)
        self._quota = Quota(1 + MAX_WAITING, settings.client_share, "estimates", retry_s=5)

    async def run(self, body: bytes, client: str) -> bytes:
        """Return the Estimate of an EstimateRequest, both as JSON.

        Raises:
            Problem: The body is invalid, too many estimates wait, or the estimate failed.
        """
        worker = Worker(
            estimate_graph,
            body,
            limit_s=MAX_WAIT_S,
            grace_s=0.0,
            memory_bytes=self._settings.profile_memory_bytes,
        )
        with self._quota.held(client):
            async with self._free:
                try:
                    result = await asyncio.to_thread(worker.run)
                except (Crashed, Killed, MissingPackage, Refused) as error:
                    limit_s = f"{MAX_WAIT_S:g} s"
                    raise graph_problem(
                        error, "estimate", limit_s, self._settings.profile_memory_bytes
                    ) from error
        if isinstance(result, Problem):
            raise result
        return result
