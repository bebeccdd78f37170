"""Runner of evaluations of maps that users made, a few at a time.

A client waits for each evaluation, and nothing is stored, so an evaluation is not a job. An
evaluation that also solves for the best placement takes seconds instead of milliseconds. Such
evaluations have a queue of their own, so that others do not wait for them.
"""

from __future__ import annotations

import asyncio
import pickle

from ..judge.evaluation import EvaluationInput, SolveLimits
from ..problem import Problem, invalid_request
from ..quota import Quota
from ..settings import Settings
from ..workers.worker import Crashed, Killed, Refused, Task, Worker

AT_ONCE = 2
MAX_WAITING = 32
LIMIT_S = 30.0

# Longest solve for the best placement, in seconds.
BEST_LIMIT_S = 15.0

# Seconds after which an evaluation must stop such a solve; it then has until LIMIT_S to answer.
STOP_AFTER_S = 20.0

BEST_AT_ONCE = 1
MAX_BEST_WAITING = 2


class Evaluations:
    """Runner of evaluations, with a queue of its own so that they do not wait for solves."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lane = _Lane(AT_ONCE, MAX_WAITING, settings, "evaluations", retry_s=1)
        noun = "evaluations with best=true"
        self._best_lane = _Lane(BEST_AT_ONCE, MAX_BEST_WAITING, settings, noun, retry_s=10)

    @property
    def best_limits(self) -> SolveLimits:
        """Return the limits of a solve for the best placement."""
        settings = self._settings
        return SolveLimits(
            min(BEST_LIMIT_S, settings.max_time_limit_s), settings.max_solver_workers
        )

    async def run(self, task: Task[bytes | Problem], given: EvaluationInput, client: str) -> bytes:
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
        with lane.quota.held(client):
            async with lane.free:
                try:
                    result = await asyncio.to_thread(worker.run)
                except Refused as error:
                    raise invalid_request(str(error)) from error
                except (Crashed, Killed) as error:
                    detail = (
                        f"the map could not be evaluated: {error}. Other requests are unaffected"
                    )
                    raise Problem(500, "not-judged", "The evaluation failed", detail) from error
        if isinstance(result, Problem):
            raise result
        return result


class _Lane:
    """Evaluations of one kind, of which some run at once and others wait."""

    def __init__(
        self, at_once: int, waiting: int, settings: Settings, noun: str, retry_s: int
    ) -> None:
        self.free = asyncio.Semaphore(at_once)
        self.quota = Quota(at_once + waiting, settings.client_share, noun, retry_s)
