"""State of a job from acceptance to answer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from placer.schema import Objective

from ..observability.spans import current_context
from ..problem import Problem
from ..workers.solving import Solved
from ..workers.worker import Worker

State = Literal["queued", "running", "done", "failed"]


@dataclass(frozen=True)
class Question:
    """Fields of a validated PlacementRequest that the service needs.

    Attributes:
        id: Content hash.
        objective: Objective that is minimised.
        time_limit_s: The solver's time limit in seconds.
        workers: Number of cores that the solver may use.
    """

    id: str
    objective: Objective
    time_limit_s: float
    workers: int = 1


@dataclass(eq=False)
class Job:
    """State of a job from acceptance to answer.

    Attributes:
        id: Hash of the request.
        payload: The request body.
        client: Client that asked first.
        state: ``queued``, ``running``, ``done`` or ``failed``.
        answer: Answer as JSON, once done.
        problem: Why there is no answer, once failed.
        finished: Set when nobody needs to wait any more.
        written: Done when the request is in the store; its exception says why it could not be
            written. None if it is there already.
        worker: Worker process, while the job runs.
        context: OpenTelemetry context of the request that asked.
        created_s: Monotonic time at which it was accepted.
        started_s: Monotonic time at which a worker started it.
    """

    id: str
    payload: bytes = b""
    client: str = ""
    state: State = "queued"
    answer: bytes | None = None
    problem: Problem | None = None
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    written: asyncio.Future[Any] | None = None
    worker: Worker[Any] | None = None
    context: Any = field(default_factory=current_context)
    created_s: float = field(default_factory=time.monotonic)
    started_s: float | None = None
    _watchers: set[asyncio.Event] = field(default_factory=set)

    @property
    def final_answer(self) -> bytes | None:
        """The answer, once nobody needs to wait any more."""
        return self.answer if self.finished.is_set() else None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the job was accepted, to the millisecond."""
        return round(time.monotonic() - self.created_s, 3)

    def notify(self) -> None:
        """Notify the watchers of a change."""
        for watcher in self._watchers:
            watcher.set()

    def finish(self) -> None:
        """Release everybody who waits for the job."""
        self.finished.set()
        self.notify()

    @contextmanager
    def watched(self) -> Iterator[asyncio.Event]:
        """Yield an event that is set whenever the job changes."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            yield changed
        finally:
            self._watchers.discard(changed)

    async def wait(self, seconds: float) -> bool:
        """Wait for the end of the job.

        Args:
            seconds: Longest time to wait.

        Returns:
            Whether the job has ended.
        """
        if seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.finished.wait()
        return self.finished.is_set()

    async def is_written(self) -> bool:
        """Wait for the write of the request, and return whether it is in the store."""
        if self.written is not None:
            await asyncio.wait([self.written])
            return self.written.exception() is None
        return True


@dataclass(eq=False, kw_only=True)
class SolveJob(Job):
    """State of a solve; its answer is a Placement.

    Attributes:
        question: The question.
        incumbent: Best objective value so far.
        bound: Proven bound so far.
        stopped: Whether a client asked to end it with the best placement so far.
        continues_later: Whether the service stops and the next start continues the job.
        recovered: Whether the worker was killed and the answer is the best that it had reported.
        elsewhere: Whether another replica answered it just before a worker here started.
        taken: Whether another replica took it before a worker here started.
        wanted: Whether it continues when no client waits for it.
        waiting: Number of clients that wait for it.
        left_waiting_s: Monotonic time at which a waiting client last received a 202.
        starts: How often a worker started it.
        best: Placement as JSON that a worker reported last before it was killed.
        solved: The parts of question and answer in which they are stored, once solved.
    """

    question: Question
    incumbent: float | None = None
    bound: float | None = None
    stopped: bool = False
    continues_later: bool = False
    recovered: bool = False
    elsewhere: bool = False
    taken: bool = False
    wanted: bool = False
    waiting: int = 0
    left_waiting_s: float = -math.inf
    starts: int = 0
    best: bytes | None = None
    solved: Solved | None = None

    def record_progress(self, incumbent: float | None, bound: float | None) -> None:
        """Record the solver's progress."""
        self.incumbent, self.bound = incumbent, bound
        self.notify()
