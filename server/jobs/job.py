"""State of one question from acceptance to answer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from ..observe.spans import here
from ..problem import Problem
from ..workers.solving import Solved
from ..workers.worker import Worker
from .question import Question

State = Literal["queued", "running", "done", "failed"]


@dataclass(eq=False)
class Job:
    """State of one question from acceptance to answer.

    Attributes:
        question: The question.
        payload: The request body.
        client: Client that asked first.
        state: ``queued``, ``running``, ``done`` or ``failed``.
        incumbent: Best objective value so far.
        bound: Proven bound so far.
        stopped: Whether a client asked to end it with the best placement so far.
        handed_on: Whether the service stops and the next start continues the job.
        rescued: Whether the worker was killed and the answer is the best that it had reported.
        elsewhere: Whether another replica answered it just before a worker here started.
        wanted: Whether it continues when no client waits for it.
        waiting: Number of clients that wait for it.
        left_waiting_s: Monotonic time at which a waiting client last received a 202.
        starts: How often a worker started it.
        created_s: Monotonic time at which it was accepted.
        started_s: Monotonic time at which a worker started it.
        best: Placement as JSON that a worker reported last before it was killed.
        answer: Placement as JSON, once done.
        solved: The parts of question and answer in which they are stored, once solved.
        problem: Why there is no answer, once failed.
        finished: Set when nobody needs to wait any more.
        written: Done when the request is in the store; its exception says why it could not be
            written.
        context: OpenTelemetry context of the request that asked.
        worker: Worker process, while the job runs.
    """

    question: Question
    payload: bytes
    client: str = ""
    state: State = "queued"
    incumbent: float | None = None
    bound: float | None = None
    stopped: bool = False
    handed_on: bool = False
    rescued: bool = False
    elsewhere: bool = False
    wanted: bool = False
    waiting: int = 0
    left_waiting_s: float = -math.inf
    starts: int = 0
    created_s: float = field(default_factory=time.monotonic)
    started_s: float | None = None
    best: bytes | None = None
    answer: bytes | None = None
    solved: Solved | None = None
    problem: Problem | None = None
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    written: asyncio.Future[bool] | None = None
    context: Any = field(default_factory=here)
    worker: Worker[Solved] | None = None
    _watchers: set[asyncio.Event] = field(default_factory=set)

    def note(self, incumbent: float | None, bound: float | None) -> None:
        """Record the solver's progress."""
        self.incumbent, self.bound = incumbent, bound
        self.wake()

    def wake(self) -> None:
        """Notify the watchers of a change."""
        for watcher in self._watchers:
            watcher.set()

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
