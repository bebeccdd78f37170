"""Jobs of other replicas: those that clients here wait for, and those that this replica takes over.

found here, solved elsewhere ──▶ watched ──▶ its answer is in the store
                                     └─ its replica died ──▶ taken ──▶ queued here
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from typing import Protocol

from ..problem import Problem
from ..store.database import StoreError
from ..store.replicas import Replicas, Seen, Turn
from ..store.store import Accepted, Store
from .job import Job
from .question import Question

log = logging.getLogger("placer_server")

POLL_S = 0.5


class Solves(Protocol):
    """Methods of ``Jobs`` that ``Peers`` calls."""

    def room(self) -> int:
        """Return the number of jobs that could start now."""

    def running(self) -> Iterable[Job]:
        """Return the jobs that have a worker here."""

    def adopt(self, left: Accepted, job: Job | None) -> None:
        """Solve a job that another replica left; ``job`` is the watched job, if there is one."""

    def end(self, key: str) -> None:
        """End a job with the best placement so far, because another replica asked for it."""


class Peers:
    """Poller of the other replicas' state, every half second.

    Args:
        store: The shared store.
        replicas: This replica's view of it.
        lease_s: See ``Replicas``.

    Attributes:
        away: Reason why the store cannot be used at the moment; empty if it can.
    """

    def __init__(self, store: Store, replicas: Replicas, lease_s: float) -> None:
        self._store = store
        self.replicas = replicas
        self._interval_s = min(POLL_S, lease_s / 8)
        self._watched: dict[str, Job] = {}
        self._told: dict[str, tuple[float | None, float | None]] = {}
        self._task: asyncio.Task[None] | None = None
        self.away = ""

    def start(self, solves: Solves) -> None:
        """Start to poll."""
        self._task = asyncio.create_task(self._look(solves))

    def find(self, key: str) -> Job | None:
        """Return the job of another replica for which a client waits here, or None."""
        return self._watched.get(key)

    async def seek(self, key: str) -> Job | None:
        """Return the job of that id if another replica has it, and watch it from now on."""
        if (job := self._watched.get(key)) is not None:
            return job
        seen = await self._store.ask(self.replicas.find, key)
        if seen is None:
            return None
        job = Job(Question(key, seen.objective, seen.time_limit_s), b"", wanted=True)  # type: ignore[arg-type]
        _note(job, seen)
        return self._watched.setdefault(key, job)

    def watch(self, job: Job) -> None:
        """Take the answer of another replica as the answer of this job."""
        job.state, job.worker = "queued", None
        self._watched[job.question.id] = job
        job.wake()

    async def close(self) -> None:
        """Stop to poll, and release this replica's jobs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for job in self._watched.values():
            job.handed_on = True
            job.finished.set()
            job.wake()
        try:
            await asyncio.to_thread(self.replicas.leave)
        except StoreError as error:
            log.error("the end could not be written down: %s", error)

    async def _look(self, solves: Solves) -> None:
        while True:
            try:
                await self._turn(solves)
                if self.away:
                    log.info("the store can be used again")
                self.away = ""
            except StoreError as error:
                if not self.away:
                    log.error("%s", error)
                self.away = str(error)
            except Exception:
                log.exception("looking at the other replicas failed")
            await asyncio.sleep(self._interval_s)

    async def _turn(self, solves: Solves) -> None:
        asked = list(self._watched)
        now = {job.question.id: (job.incumbent, job.bound) for job in solves.running()}
        new = {
            key: found for key, found in now.items() if self._told.get(key, (None, None)) != found
        }
        turn = await asyncio.to_thread(self.replicas.turn, new, asked, solves.room())
        if turn.told:
            self._told = now
        for key in turn.stops:
            solves.end(key)
        for left in turn.taken:
            log.info("solve %s was another replica's and goes on here", left.id)
            solves.adopt(left, self._watched.pop(left.id, None))
        await self._follow(asked, turn)

    async def _follow(self, asked: Iterable[str], turn: Turn) -> None:
        for key in asked:
            job = self._watched.get(key)
            if job is None:
                continue
            if key in turn.seen:
                _note(job, turn.seen[key])
            else:
                await self._finish(key, job)

    async def _finish(self, key: str, job: Job) -> None:
        """Take over the outcome of a job that ended elsewhere."""
        answer = await asyncio.to_thread(self._store.get, key)
        failure = None if answer else await asyncio.to_thread(self._store.failure, key)
        if answer is not None:
            job.answer, job.state = answer.placement, "done"
        else:
            job.problem, job.state = _problem(failure), "failed"
        self._watched.pop(key, None)
        job.payload = b""
        job.finished.set()
        job.wake()


def _note(job: Job, seen: Seen) -> None:
    job.state = "running" if seen.running else "queued"
    if (job.incumbent, job.bound) != (seen.incumbent, seen.bound):
        job.note(seen.incumbent, seen.bound)


def _problem(failure: tuple[int, bytes] | None) -> Problem:
    if failure is None:
        detail = "another replica ended it, and its answer is kept no more; ask again"
        return Problem(500, "solver-failed", "The solver failed", detail)
    told = json.loads(failure[1])
    return Problem(
        failure[0],
        told["type"].rpartition(":")[2],
        told["title"],
        told["detail"],
        told.get("errors", ()),
    )
