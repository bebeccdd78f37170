"""Runner of the measurements of graphs that clients send."""

from __future__ import annotations

import asyncio
import logging

from ..observability.metrics import Metrics
from ..problem import Problem
from ..settings import Settings
from ..store.database import StoreError
from ..store.store import Store
from ..workers import measuring
from ..workers.worker import Crashed, Killed, MissingPackage, Refused, Worker
from .job import Job
from .outcomes import graph_problem, stopping
from .runner import Runner

log = logging.getLogger("placer_server")

MAX_WAITING = 8
ENDED_KEPT = 100


class Measurements(Runner[Job]):
    """Runner of measurements, one at a time so that they do not disturb one another's times.

    Accepted graphs stay in the store until they are measured; the next start on this node continues
    with them.
    """

    span = "placer.profile"
    noun = "measurement"
    kept = ENDED_KEPT

    def __init__(self, settings: Settings, store: Store, metrics: Metrics) -> None:
        super().__init__(settings, store, metrics, 1, MAX_WAITING)

    def submit(self, key: str, body: bytes, client: str) -> Job:
        """Measure a graph, unless its measurement is pending already.

        Raises:
            Problem: Too many graphs wait, or the service is stopping.
        """
        if (pending := self._queued.get(key) or self._running.get(key)) is not None:
            return pending
        if self._closing:
            raise stopping()
        self._refuse_overflow(client)
        job = Job(key, body, client)
        node = self._settings.node_name
        job.written = asyncio.ensure_future(
            asyncio.to_thread(self._store.accept_graph, key, node, body)
        )
        self._enqueue(job)
        return job

    async def resume(self) -> None:
        """Continue graphs that another service on this node left unmeasured; check repeatedly."""
        while not self._closing:
            try:
                left = await asyncio.to_thread(self._store.take_graphs, self._settings.node_name)
            except StoreError as error:
                log.error("unmeasured graphs could not be read: %s", error)
                left = []
            for key, body in left:
                if self._queued.get(key) is None and key not in self._running:
                    log.info("graph %s was accepted by an earlier service and continues here", key)
                    self._enqueue(Job(key, body))
            await asyncio.sleep(self._settings.lease_s / 4)

    def stop_all(self) -> None:
        """End the running measurement, and leave all graphs to the next start."""
        if self._closing:
            return
        self._closing = True
        for job in self._queued.all():
            self._queued.remove(job)
            self._tasks.spawn(self._end_queued(job))
        for job in self._running.values():
            if job.worker is not None:
                job.worker.stop()

    async def _end_queued(self, job: Job) -> None:
        await job.is_written()
        job.problem = stopping()
        self._finish(job)

    def _worker(self, job: Job) -> Worker[bytes]:
        return Worker(
            measuring.profile_graph,
            job.payload,
            limit_s=self._settings.profile_timeout_s,
            # A measurement cannot return a part of its profile, so it is killed at once.
            grace_s=0.0,
            memory_bytes=self._settings.profile_memory_bytes,
        )

    def _compute(self, job: Job) -> None:
        assert job.worker is not None
        profile: bytes = job.worker.run()
        job.answer = profile
        try:
            self._store.put_measured(job.id, self._settings.node_name, profile)
        except StoreError as error:
            log.error("profile %s could not be written, and is kept in memory: %s", job.id, error)

    async def _note_failure(self, job: Job, error: Exception) -> None:
        settings = self._settings
        if isinstance(error, Problem):
            job.problem = error
        elif self._closing and isinstance(error, Killed):
            job.problem = stopping()
        else:
            limit_s = f"{settings.profile_timeout_s:g} s (PLACER_PROFILE_TIMEOUT_S)"
            job.problem = graph_problem(error, "measure", limit_s, settings.profile_memory_bytes)
        is_expected = isinstance(error, Problem | MissingPackage | Refused | Killed | Crashed)
        if job.problem.name == "not-measured":
            trace = None if is_expected else error
            log.error("graph %s could not be measured: %s", job.id, error, exc_info=trace)
        # Otherwise the graph stays in the store, and the next start measures it.
        if is_expected and not self._closing:
            try:
                await asyncio.to_thread(self._store.delete_graph, job.id, self._settings.node_name)
            except StoreError as unwritten:
                log.error("the end of graph %s could not be written: %s", job.id, unwritten)

    def _attributes(self, job: Job) -> dict[str, str]:
        return {"placer.id": job.id}

    def _outcome(self, job: Job) -> dict[str, str | int]:
        return {"error": job.problem.title} if job.problem is not None else {}

    def _count(self, job: Job) -> None:
        self._metrics.profiles.labels("failed" if job.problem else "answered").inc()

    def _retry_after_s(self) -> int:
        # About the time of one measurement.
        return 10
