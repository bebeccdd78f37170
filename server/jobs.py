"""The solves: those that run, each in a worker, and those that wait for one.

submit ──▶ queued ──▶ running ──▶ done | failed
              └────── stop ──────▶ done, with the best so far
"""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import placer
from placer.schema import Placement

from .body import Question
from .metrics import Metrics
from .problem import Problem
from .settings import Settings
from .store import Answer, Store
from .worker import Crashed, Killed, Missing, Refused, Solver, SolveTask, Worker

log = logging.getLogger("placer_server")

MAX_RETRY_AFTER_S = 30
FAILURES_KEPT = 1000

State = Literal["queued", "running", "done", "failed"]


@dataclass(eq=False)
class Job:
    """One question on its way to an answer.

    Attributes:
        question: what is asked.
        payload: the request as it was sent.
        state: how far it is.
        incumbent: the best objective value so far.
        bound: the proven bound so far.
        stopped: whether it was told to end with the best so far.
        created_s: when it was asked, by the monotonic clock.
        started_s: when a worker took it, by the monotonic clock.
        answer: the Placement as JSON, once done.
        problem: why there is none, once failed.
        finished: set when it is done or failed.
    """

    question: Question
    payload: bytes
    state: State = "queued"
    incumbent: float | None = None
    bound: float | None = None
    stopped: bool = False
    created_s: float = field(default_factory=time.monotonic)
    started_s: float | None = None
    answer: bytes | None = None
    problem: Problem | None = None
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    worker: Worker | None = None

    def note(self, incumbent: float | None, bound: float | None) -> None:
        """Take over the solver's progress."""
        self.incumbent, self.bound = incumbent, bound

    async def wait(self, seconds: float) -> bool:
        """Wait for the end of the job; whether it came within ``seconds``."""
        if seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.finished.wait()
        return self.finished.is_set()


class Jobs:
    """Runs the solves, at most ``settings.workers`` at once, with at most ``settings.queue`` waiting.

    All methods are called in the event loop.
    """

    def __init__(self, settings: Settings, store: Store, metrics: Metrics, solver: Solver) -> None:
        self._settings = settings
        self._store = store
        self._metrics = metrics
        self._task = SolveTask(solver)
        self._threads = ThreadPoolExecutor(settings.workers, thread_name_prefix="placer-solve")
        self._running: dict[str, Job] = {}
        self._queued: dict[str, Job] = {}  # in the order in which they came
        self._failed: OrderedDict[str, Job] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    def find(self, key: str) -> Job | None:
        """The job of that id that is queued, runs or failed lately."""
        return self._queued.get(key) or self._running.get(key) or self._failed.get(key)

    def submit(self, question: Question, payload: bytes) -> Job:
        """The job that answers the question: one that is on its way already, else a new one.

        Raises:
            Problem: the queue is full, or the service is stopping.
        """
        job = self.find(question.id)
        if job is not None and job.state != "failed" and not job.stopped:
            return job
        if self._closing:
            raise _stopping()
        if len(self._running) >= self._settings.workers and len(self._queued) >= self._settings.queue:
            self._metrics.rejections.inc()
            raise self._queue_full()
        self._failed.pop(question.id, None)
        job = Job(question, payload)
        self._queued[question.id] = job
        self._start_next()
        return job

    async def stop(self, job: Job) -> None:
        """End the job with the best placement so far, and wait for it."""
        self._tell(job)
        await job.finished.wait()

    def stop_all(self) -> None:
        """End every job with the best so far, and take no more."""
        self._closing = True
        for job in [*self._queued.values(), *self._running.values()]:
            self._tell(job)

    async def close(self) -> None:
        """End every job, and wait for their workers."""
        self.stop_all()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._threads.shutdown(wait=True)

    def _tell(self, job: Job) -> None:
        job.stopped = True
        if job.worker is not None:
            job.worker.stop()
        elif self._queued.get(job.question.id) is job:
            del self._queued[job.question.id]
            job.answer = _nothing_found(job)
            self._spawn(asyncio.to_thread(self._keep, job))
            self._finish(job)

    def _start_next(self) -> None:
        for job in self._startable():
            del self._queued[job.question.id]
            self._running[job.question.id] = job
            settings = self._settings
            job.worker = Worker(
                self._task,
                job.payload,
                job.note,
                limit_s=job.question.time_limit_s + settings.overrun_s,
                grace_s=settings.stop_grace_s,
            )
            job.state, job.started_s = "running", time.monotonic()
            self._spawn(self._run(job, job.worker))
        self._count()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _startable(self) -> Iterable[Job]:
        """The first of the queue, for as many workers as are free; never two jobs of one id at once."""
        free = self._settings.workers - len(self._running)
        return list(islice((job for key, job in self._queued.items() if key not in self._running), max(0, free)))

    async def _run(self, job: Job, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, self._solve, job, worker)
        except Exception as error:
            job.problem = _failure(error)
            if job.problem.status >= 500:
                log.error("solve %s failed: %s", job.question.id, error)
        self._finish(job)

    def _solve(self, job: Job, worker: Worker) -> None:
        """Runs in a thread of its own."""
        try:
            job.answer = worker.run()
        except Killed:
            if not job.stopped:
                raise
            job.answer = _nothing_found(job)
        self._keep(job)

    def _keep(self, job: Job) -> None:
        assert job.answer is not None
        answer = Answer(job.answer, complete=not job.stopped, version=placer.__version__)
        try:
            self._store.put(job.question.id, answer)
        except sqlite3.Error as error:
            log.error("placement %s could not be written, and is kept in memory: %s", job.question.id, error)

    def _finish(self, job: Job) -> None:
        key = job.question.id
        if self._running.get(key) is job:
            del self._running[key]
            self._metrics.solve_seconds.observe(time.monotonic() - (job.started_s or job.created_s))
        job.payload = b""
        job.state = "failed" if job.problem is not None else "done"
        if job.problem is not None:
            self._failed[key] = job
            if len(self._failed) > FAILURES_KEPT:
                self._failed.popitem(last=False)
        self._metrics.solves.labels(_how(job)).inc()
        job.finished.set()
        self._start_next()

    def _count(self) -> None:
        self._metrics.running.set(len(self._running))
        self._metrics.queued.set(len(self._queued))

    def _queue_full(self) -> Problem:
        now = time.monotonic()
        left = [(job.started_s or now) + job.question.time_limit_s - now for job in self._running.values()]
        seconds = min(MAX_RETRY_AFTER_S, max(1, math.ceil(min(left, default=1))))
        detail = (
            f"{len(self._running)} solves run and {len(self._queued)} wait, which is all that this service takes;"
            f" try again in {seconds} s"
        )
        return Problem(429, "queue-full", "The queue is full", detail, headers={"Retry-After": str(seconds)})


def _nothing_found(job: Job) -> bytes:
    placement = Placement(
        id=job.question.id, status="unknown", objective=job.question.objective, method="stopped before any was found"
    )
    return placement.model_dump_json().encode()


def _failure(error: Exception) -> Problem:
    if isinstance(error, Refused):
        return Problem(422, "invalid-request", "The request cannot be used", str(error))
    if isinstance(error, Missing):
        return Problem(501, "missing-package", "This service lacks a package", str(error))
    if isinstance(error, Killed | Crashed):
        detail = f"the solver failed on this request: {error}. Other requests are not touched; asking again tries again"
        return Problem(500, "solver-failed", "The solver failed", detail)
    return Problem(500, "solver-failed", "The solver failed", f"the worker could not be run: {error}")


def _stopping() -> Problem:
    detail = "the service is stopping; ask again in a moment"
    return Problem(503, "stopping", "The service is stopping", detail, headers={"Retry-After": "5"})


def _how(job: Job) -> str:
    if job.problem is not None:
        return "failed"
    return "stopped" if job.stopped else "answered"
