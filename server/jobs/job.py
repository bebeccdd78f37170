"""One question on its way to an answer."""

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
    """One question on its way to an answer.

    Attributes:
        question: what is asked.
        payload: the request as it was sent.
        client: who asked first.
        state: how far it is.
        incumbent: the best objective value so far.
        bound: the proven bound so far.
        stopped: whether it was told to end with the best so far.
        handed_on: whether the service stops and the next start goes on with it.
        rescued: whether its worker was killed, and the answer is the best that it had told.
        elsewhere: whether another replica answered it just before a worker here began.
        wanted: whether it goes on when nobody waits for it.
        waiting: how many wait for it.
        left_waiting_s: when somebody who waited was last told that it goes on, by the monotonic
            clock.
        starts: how often a worker began with it.
        created_s: when it was asked, by the monotonic clock.
        started_s: when a worker took it, by the monotonic clock.
        best: the Placement as JSON that a worker told of last before it was killed.
        answer: the Placement as JSON, once done.
        asked: the question in the parts in which it is kept, once solved.
        problem: why there is none, once failed.
        finished: set when nothing more is to be waited for.
        context: of the request that asked, for OpenTelemetry.
        written: done when the request is in the store; the exception is why it could not be
            written.
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
        """Take over the solver's progress."""
        self.incumbent, self.bound = incumbent, bound
        self.wake()

    def wake(self) -> None:
        """Let those who watch look again."""
        for watcher in self._watchers:
            watcher.set()

    @contextmanager
    def watched(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever something changes."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            yield changed
        finally:
            self._watchers.discard(changed)

    async def wait(self, seconds: float) -> bool:
        """Wait for the end of the job; whether it came within ``seconds``."""
        if seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.finished.wait()
        return self.finished.is_set()

    async def is_written(self) -> bool:
        """Whether the request is in the store, once that is known."""
        if self.written is not None:
            await asyncio.wait([self.written])
            return self.written.exception() is None
        return True
