"""Runner of jobs in worker processes: queue, limits per client, retries and shutdown.

submit ──▶ queued ──▶ running ──▶ done | failed
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

from placer.utils.units import count_text

from ..observability.metrics import Metrics
from ..observability.spans import span
from ..problem import queue_full
from ..settings import Settings
from ..store.store import Store
from ..workers.worker import Died, Worker
from .job import Job
from .queue import FairQueue

J = TypeVar("J", bound=Job)
T = TypeVar("T")

log = logging.getLogger("placer_server")


class Runner(ABC, Generic[J]):
    """Runner of one kind of jobs: ``slots`` of them run, and the others wait in a fair queue.

    A subclass says what a worker does for a job and what becomes of its answer or error. Call all
    methods in the event loop.

    Args:
        slots: Largest number of jobs that run at the same time.
        places: Largest number of jobs that wait for a slot.

    Attributes:
        span: Name of a job's span, such as ``placer.solve``.
        noun: Name of a job in messages.
        kept: Number of ended jobs that stay in memory.
    """

    span: str
    noun: str
    kept: int

    def __init__(
        self, settings: Settings, store: Store, metrics: Metrics, slots: int, places: int
    ) -> None:
        self._settings = settings
        self._store = store
        self._metrics = metrics
        self._slots = slots
        self._places = places
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix=f"placer-{self.noun}")
        self._running: dict[str, J] = {}
        self._queued: FairQueue[J] = FairQueue()
        self._ended: OrderedDict[str, J] = OrderedDict()
        self._tasks = Tasks()
        self._closing = False

    def find(self, key: str) -> J | None:
        """Return the job of that id that is queued, runs or ended lately, or None."""
        return self._queued.get(key) or self._running.get(key) or self._ended.get(key)

    def running(self) -> list[J]:
        """Return the jobs that have a worker."""
        return list(self._running.values())

    @abstractmethod
    def stop_all(self) -> None:
        """End every job, and accept no more."""

    async def close(self) -> None:
        """End every job, and wait for the workers."""
        self.stop_all()
        await self._tasks.wait()
        self._threads.shutdown(wait=True)

    @abstractmethod
    def _worker(self, job: J) -> Worker[Any]:
        """Return a new worker for a job."""

    @abstractmethod
    def _compute(self, job: J) -> None:
        """Run the worker of a job, in the calling thread, and store the answer."""

    @abstractmethod
    async def _note_failure(self, job: J, error: Exception) -> None:
        """Record why a job has no answer."""

    def _continues(self, job: J, error: Exception) -> bool:
        """Return whether the job continues after this error, now or at the next start."""
        return False

    @abstractmethod
    def _attributes(self, job: J) -> Mapping[str, str]:
        """Return the attributes of a job's span that are known at its start."""

    @abstractmethod
    def _outcome(self, job: J) -> Mapping[str, str | int]:
        """Return the attributes of a job's span that are known at its end."""

    @abstractmethod
    def _count(self, job: J) -> None:
        """Count an ended job in the metrics."""

    def _remembers(self, job: J) -> bool:
        """Return whether an ended job stays in memory for ``find``."""
        return True

    @abstractmethod
    def _retry_after_s(self) -> int:
        """Return the seconds after which a rejected client may ask again."""

    def _enqueue(self, job: J) -> None:
        # An earlier attempt, which failed or was stopped, must not be found any more.
        self._ended.pop(job.id, None)
        self._queued.add(job)
        self._start_next()

    def _refuse_overflow(self, client: str) -> None:
        """Reject a job if the queue is full or the client fills its share of it.

        Raises:
            Problem: No place is free for the client.
        """
        if len(self._running) < self._slots:
            return
        held = self._queued.held_by(client)
        if len(self._queued) >= self._places:
            running = count_text(len(self._running), self.noun)
            reason = f"{running} running and {len(self._queued)} waiting are the service's limit"
        elif held >= math.ceil(self._places * self._settings.client_share):
            waiting = count_text(held, self.noun)
            reason = f"{waiting} waiting are the limit for one client (PLACER_CLIENT_SHARE)"
        else:
            return
        self._metrics.rejections.inc()
        raise queue_full(reason, self._retry_after_s())

    def _start_next(self) -> None:
        if self._closing:
            return
        while (
            len(self._running) < self._slots
            and (job := self._queued.pop(self._running)) is not None
        ):
            # Create the worker here, so that a stop before its thread starts has effect.
            self._running[job.id] = job
            job.worker = self._worker(job)
            job.state, job.started_s = "running", time.monotonic()
            self._tasks.spawn(self._run(job), end_of=job.id)
            job.notify()
        self._note_load()

    def _note_load(self) -> None:
        """Record the numbers of running and queued jobs in the metrics."""

    async def _run(self, job: J) -> None:
        with span(self.span, self._attributes(job), job.context) as outcome:
            # Otherwise the row could be written after the answer, and never be deleted.
            await job.is_written()
            await self._work(job)
            outcome |= self._outcome(job)
        self._finish(job)

    async def _work(self, job: J) -> None:
        """Compute the answer of a job, in further workers if that may help."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.run_in_executor(self._threads, self._compute, job)
                return
            except Exception as error:
                if isinstance(error, Died) and self._continues(job, error) and not self._closing:
                    log.warning("%s %s is tried again: %s", self.noun, job.id, error)
                    job.worker = self._worker(job)
                    continue
                await self._note_failure(job, error)
                return

    def _finish(self, job: J) -> None:
        """Release the slot of a job, and answer those who wait for it."""
        self._release(job)
        job.state = "failed" if job.problem is not None else "done"
        if self._remembers(job):
            self._ended[job.id] = job
            if len(self._ended) > self.kept:
                self._ended.popitem(last=False)
        self._count(job)
        job.finish()
        self._start_next()

    def _release(self, job: J) -> None:
        # A later job may have the same id by now.
        if self._running.get(job.id) is job:
            del self._running[job.id]
        job.payload = b""
        # Break the reference cycle between the job and its worker.
        job.worker = None


class Tasks:
    """Pending asyncio tasks; those that write the end of a job are found by the job's id."""

    def __init__(self) -> None:
        self._all: set[asyncio.Task[Any]] = set()
        self._ends: dict[str, asyncio.Task[Any]] = {}

    def spawn(self, work: Coroutine[Any, Any, T], *, end_of: str = "") -> asyncio.Task[T]:
        """Start a task.

        Args:
            work: Coroutine of the task.
            end_of: Id of the job whose end the task writes; none if empty.
        """
        task = asyncio.create_task(work)
        self._all.add(task)
        if end_of:
            self._ends[end_of] = task
        task.add_done_callback(partial(self._forget, end_of))
        return task

    def end_of(self, key: str) -> asyncio.Task[Any] | None:
        """Return the pending task that writes the end of a job, or None."""
        return self._ends.get(key)

    async def wait(self) -> None:
        """Wait for all tasks."""
        if self._all:
            await asyncio.wait(self._all)

    def _forget(self, key: str, task: asyncio.Task[Any]) -> None:
        self._all.discard(task)
        if self._ends.get(key) is task:
            del self._ends[key]
