"""Runners of evaluations of maps that users made, and of estimates of graphs, a few at a time.

A client waits for each of them, and nothing is stored, so none of them is a job. An evaluation that
also solves for the best placement takes seconds instead of milliseconds. Each kind has a queue of
its own, so that others do not wait for it.
"""

from __future__ import annotations

import asyncio
import pickle

from ..judge.evaluation import EvaluationInput, SolveLimits
from ..problem import Problem, invalid_request
from ..quota import Quota
from ..settings import MAX_WAIT_S, Settings
from ..workers.measuring import estimate_graph
from ..workers.worker import Crashed, Killed, MissingPackage, Refused, Task, Worker
from .outcomes import graph_problem

AT_ONCE = 2
MAX_WAITING = 32
LIMIT_S = 30.0

# Longest solve for the best placement, in seconds.
BEST_LIMIT_S = 15.0

# Seconds after which an evaluation must stop such a solve; it then has until LIMIT_S to answer.
STOP_AFTER_S = 20.0

BEST_AT_ONCE = 1
MAX_BEST_WAITING = 2

MAX_ESTIMATES_WAITING = 8


class _Lane:
    """Workers of one kind, of which some run at once and others wait."""

    def __init__(
        self, at_once: int, waiting: int, settings: Settings, noun: str, retry_s: int
    ) -> None:
        self.free = asyncio.Semaphore(at_once)
        self.quota = Quota(at_once + waiting, settings.client_share, noun, retry_s)

    async def run(self, worker: Worker[bytes], client: str) -> bytes:
        """Return the result of a worker; see ``Quota.take`` and ``Worker.run`` for the errors."""
        with self.quota.held(client):
            async with self.free:
                return await asyncio.to_thread(worker.run)


class Evaluations:
    """Runner of evaluations."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lane = _Lane(AT_ONCE, MAX_WAITING, settings, "evaluations", retry_s=1)
        noun = "evaluations with best=true"
        self._best_lane = _Lane(BEST_AT_ONCE, MAX_BEST_WAITING, settings, noun, retry_s=10)

    @property
    def best_limits(self) -> SolveLimits:
        """Return the limits of a solve for the best placement."""
        time_s = min(BEST_LIMIT_S, self._settings.max_time_limit_s)
        return SolveLimits(time_s, self._settings.max_solver_workers)

    async def run(self, task: Task[bytes], given: EvaluationInput, client: str) -> bytes:
        """Run an evaluation, and return its result.

        Raises:
            Problem: The body is invalid, too many evaluations wait, or the evaluation failed.
        """
        limit_s = LIMIT_S if given.best is None else STOP_AFTER_S
        worker = Worker(
            task,
            pickle.dumps(given),
            limit_s=limit_s,
            grace_s=LIMIT_S - limit_s,
            memory_bytes=self._settings.worker_memory_bytes,
        )
        lane = self._lane if given.best is None else self._best_lane
        try:
            return await lane.run(worker, client)
        except Refused as error:
            raise invalid_request(str(error)) from error
        except (Crashed, Killed) as error:
            detail = f"the map could not be evaluated: {error}. Other requests are unaffected"
            raise Problem(500, "not-judged", "The evaluation failed", detail) from error


class Estimates:
    """Runner of estimates of graphs that clients send, one at a time."""

    def __init__(self, settings: Settings) -> None:
        self._memory_bytes = settings.profile_memory_bytes
        self._lane = _Lane(1, MAX_ESTIMATES_WAITING, settings, "estimates", retry_s=5)

    async def run(self, body: bytes, client: str) -> bytes:
        """Return the Estimate of an EstimateRequest, both as JSON.

        Raises:
            Problem: The body is invalid, too many estimates wait, or the estimate failed.
        """
        worker = Worker(
            estimate_graph, body, limit_s=MAX_WAIT_S, grace_s=0.0, memory_bytes=self._memory_bytes
        )
        try:
            return await self._lane.run(worker, client)
        except (Crashed, Killed, MissingPackage, Refused) as error:
            limit_s = f"{MAX_WAIT_S:g} s"
            raise graph_problem(error, "estimate", limit_s, self._memory_bytes) from error
