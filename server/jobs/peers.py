"""Jobs of other replicas: those that clients here wait for, and those that this replica takes over.

found here, solved elsewhere ──▶ watched ──▶ its answer is in the store
                                     └─ its replica died ──▶ taken ──▶ queued here
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from typing import Protocol, cast

from placer.schema import Objective

from ..problem import Problem
from ..store.database import StoreError
from ..store.replicas import JobProgress, PollResult, Replicas
from ..store.store import Accepted, Store
from .job import Question, SolveJob

log = logging.getLogger("placer_server")

POLL_S = 0.5


class LocalSolves(Protocol):
    """Methods of ``Solves`` that ``Peers`` calls."""

    def free_slots(self) -> int:
        """Return the number of jobs that could start now."""

    def running(self) -> Iterable[SolveJob]:
        """Return the jobs that have a worker here."""

    def adopt(self, left: Accepted, job: SolveJob | None) -> None:
        """Solve a job that another replica left; ``job`` is the watched job, if there is one."""

    def end_early(self, key: str) -> None:
        """End a job with the best placement so far, because another replica asked for it."""


class Peers:
    """Poller of the other replicas' state, every half second.

    Attributes:
        store_error: Reason why the store cannot be used at the moment; empty if it can.
    """

    def __init__(self, store: Store, replicas: Replicas, lease_s: float) -> None:
        self._store = store
        self.replicas = replicas
        self._interval_s = min(POLL_S, lease_s / 8)
        self._watched: dict[str, SolveJob] = {}
        self._sent: dict[str, tuple[float | None, float | None]] = {}
        self._task: asyncio.Task[None] | None = None
        self.store_error = ""

    def start(self, solves: LocalSolves) -> None:
        """Start polling."""
        self._task = asyncio.create_task(self._poll_forever(solves))

    def find(self, key: str) -> SolveJob | None:
        """Return the job of another replica for which a client waits here, or None."""
        return self._watched.get(key)

    async def seek(self, key: str) -> SolveJob | None:
        """Return the job of that id if another replica has it, and watch it from now on."""
        if (job := self._watched.get(key)) is not None:
            return job
        seen = await self._store.call(self.replicas.find, key)
        if seen is None:
            return None
        question = Question(key, cast(Objective, seen.objective), seen.time_limit_s)
        job = SolveJob(key, question=question, wanted=True)
        _note(job, seen)
        # Another request may have begun to watch the job while the store was asked.
        return self._watched.setdefault(key, job)

    def watch(self, job: SolveJob) -> None:
        """Take the answer of another replica as the answer of this job."""
        job.state, job.worker = "queued", None
        self._watched[job.id] = job
        job.notify()

    async def close(self) -> None:
        """Stop polling, and release this replica's jobs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for job in self._watched.values():
            job.continues_later = True
            job.finish()
        try:
            await asyncio.to_thread(self.replicas.leave)
        except StoreError as error:
            log.error("this replica could not release its jobs: %s", error)

    async def _poll_forever(self, solves: LocalSolves) -> None:
        while True:
            try:
                await self._poll(solves)
                if self.store_error:
                    log.info("the store can be used again")
                self.store_error = ""
            except StoreError as error:
                if not self.store_error:
                    log.error("%s", error)
                self.store_error = str(error)
            except Exception:
                log.exception("the poll of the other replicas failed")
            await asyncio.sleep(self._interval_s)

    async def _poll(self, solves: LocalSolves) -> None:
        # A snapshot: a job that is added while the store answers is not in its result, and would
        # seem to have ended.
        watched = list(self._watched)
        now = {job.id: (job.incumbent, job.bound) for job in solves.running()}
        new = {
            key: found for key, found in now.items() if self._sent.get(key, (None, None)) != found
        }
        result = await asyncio.to_thread(self.replicas.poll, new, watched, solves.free_slots())
        if result.progress_written:
            self._sent = now
        for key in result.stops:
            solves.end_early(key)
        for left in result.taken:
            log.info("solve %s of another replica continues here", left.id)
            solves.adopt(left, self._watched.pop(left.id, None))
        await self._follow(watched, result)

    async def _follow(self, watched: Iterable[str], result: PollResult) -> None:
        for key in watched:
            job = self._watched.get(key)
            if job is None:
                continue
            if key in result.seen:
                _note(job, result.seen[key])
            else:
                await self._finish(key, job)

    async def _finish(self, key: str, job: SolveJob) -> None:
        """Take over the outcome of a job that ended elsewhere."""
        answer = await asyncio.to_thread(self._store.get, key)
        failure = None if answer else await asyncio.to_thread(self._store.failure, key)
        if answer is not None:
            job.answer, job.state = answer.placement, "done"
        else:
            job.problem, job.state = _problem(failure), "failed"
        self._watched.pop(key, None)
        job.payload = b""
        job.finish()


def _note(job: SolveJob, seen: JobProgress) -> None:
    job.state = "running" if seen.running else "queued"
    if (job.incumbent, job.bound) != (seen.incumbent, seen.bound):
        job.record_progress(seen.incumbent, seen.bound)


def _problem(failure: tuple[int, bytes] | None) -> Problem:
    if failure is None:
        detail = "another replica answered it, and the answer is no longer stored; ask again"
        return Problem(500, "solver-failed", "The solver failed", detail)
    status, content = failure[0], json.loads(failure[1])
    name = content["type"].rpartition(":")[2]
    return Problem(status, name, content["title"], content["detail"], content.get("errors", ()))
