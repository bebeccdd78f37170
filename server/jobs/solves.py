"""Runner of the solves.

submit ──▶ queued ──▶ running ──▶ done | failed
              └────── stop ──────▶ done, with the best placement so far
              └──── shutdown ────▶ continued by the next start
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from placer.schema import Objective

from ..observability.metrics import Metrics
from ..settings import Settings
from ..store.database import StoreError
from ..store.replicas import Begun
from ..store.store import Accepted, Store
from ..workers.solving import RecoveredSolver, Solved, Solver, SolveTask
from ..workers.worker import Crashed, Died, Killed, MemoryExceeded, Refused, Worker
from .job import Question, SolveJob
from .outcomes import (
    check_limits,
    empty_placement,
    gap_of,
    outcome_label,
    solve_problem,
    stopping,
    store_answer,
)
from .peers import Peers
from .runner import Runner

log = logging.getLogger("placer_server")

MAX_RETRY_AFTER_S = 30

# Seconds within which a waiting client asks again after a 202: a round trip and a margin.
RETURN_S = 1.0

FAILURES_KEPT = 1000

# Threads that write accepted requests, if the store takes several at a time.
_WRITERS = 4

# Time limit of a recovery in seconds; 20,000 layers take 2 s.
RECOVERY_S = 30.0

# Maximum attempts of a job whose worker or service was killed each time.
MAX_STARTS = 3


class Solves(Runner[SolveJob]):
    """Runner of the solves: ``settings.workers`` of them run, and ``settings.queue`` wait.

    Args:
        solver: Function that solves a request.
        peers: View of the other replicas, if several share the store.
    """

    span = "placer.solve"
    noun = "solve"
    kept = FAILURES_KEPT

    def __init__(
        self,
        settings: Settings,
        store: Store,
        metrics: Metrics,
        solver: Solver,
        peers: Peers | None = None,
    ) -> None:
        super().__init__(settings, store, metrics, settings.workers, settings.queue)
        self._peers = peers
        self._solver = solver
        writers = _WRITERS if store.database.remote else 1
        # Threads of their own: accepting a request must not wait for a worker's thread.
        self._writers = ThreadPoolExecutor(writers, thread_name_prefix="placer-accept")
        # Jobs that were stopped before a worker started; their end is being written.
        self._unsolved: dict[str, SolveJob] = {}

    def find(self, key: str) -> SolveJob | None:
        """Return the job of that id, or None.

        It is queued, runs, failed lately, or is watched while another replica solves it.
        """
        watched = self._peers.find(key) if self._peers else None
        here = self._queued.get(key) or self._running.get(key) or self._unsolved.get(key)
        return here or watched or self._ended.get(key)

    async def find_anywhere(self, key: str) -> SolveJob | None:
        """Return the job of that id, even if only another replica knows it.

        Raises:
            StoreError: The job is not here, and the store cannot be used.
        """
        job = self.find(key)
        return await self._peers.seek(key) if job is None and self._peers else job

    def submit(self, question: Question, payload: bytes, client: str = "") -> SolveJob:
        """Return the job that answers the question: an existing one or a new one.

        Raises:
            Problem: The question exceeds a limit, the queue is full, or the service is stopping.
        """
        job = self.find(question.id)
        # A failed job may succeed now, and a stopped one may have less than the whole answer.
        if job is not None and job.state != "failed" and not job.stopped:
            return job
        if self._closing:
            raise stopping()
        check_limits(question, self._settings)
        self._refuse_overflow(client)
        job = SolveJob(question.id, payload, client, question=question)
        accepted = Accepted(question.id, client, question.objective, question.time_limit_s, payload)
        # The row is written in the background; the job waits for it before it starts.
        job.written = self._accept(accepted)
        job.written.add_done_callback(lambda future: self._note_written(job, future))
        self._enqueue(job)
        return job

    def _accept(self, accepted: Accepted) -> asyncio.Future[bool]:
        """Write a request to the store, after the end of an earlier stopped job with the same id.

        The end of the earlier job deletes the row of that id.
        """
        before = self._tasks.end_of(accepted.id)
        if before is not None:
            return self._tasks.spawn(self._accept_after(before, accepted))
        return asyncio.get_running_loop().run_in_executor(
            self._writers, self._store.accept, accepted
        )

    async def _accept_after(self, before: asyncio.Task[Any], accepted: Accepted) -> bool:
        await asyncio.wait([before])
        return await asyncio.get_running_loop().run_in_executor(
            self._writers, self._store.accept, accepted
        )

    def resume(self) -> None:
        """Continue accepted jobs without an answer, one by one as workers become free.

        An in-memory store has none.
        """
        if self._peers:
            self._peers.start(self)

    @property
    def store_error(self) -> str:
        """Reason why the shared store cannot be used; empty if it can."""
        return self._peers.store_error if self._peers else ""

    def free_slots(self) -> int:
        """Return the number of jobs that could start now."""
        if self._closing:
            return 0
        return max(0, self._slots - len(self._running) - len(self._queued))

    def adopt(self, left: Accepted, job: SolveJob | None) -> None:
        """Solve a job that another replica left; its watchers here wait for this job."""
        if job is None:
            objective = cast(Objective, left.objective)
            question = Question(left.id, objective, left.time_limit_s)
            job = SolveJob(left.id, client=left.client, question=question, wanted=True)
        job.payload, job.starts, job.state = left.request, left.starts, "queued"
        if self._queued.get(left.id) is None and left.id not in self._running:
            self._enqueue(job)

    def end_early(self, key: str) -> None:
        """End a job with the best placement so far, because another replica asked for it."""
        job = self._queued.get(key) or self._running.get(key)
        if job is not None and not job.stopped:
            self._end_with_best(job)

    def _note_written(self, job: SolveJob, future: asyncio.Future[bool]) -> None:
        if future.cancelled():
            return
        if (error := future.exception()) is not None:
            log.error("request %s could not be written; a crash would lose it: %s", job.id, error)
        elif not future.result() and self._peers and self._queued.get(job.id) is job:
            # Another replica accepted the same request before.
            self._queued.remove(job)
            self._peers.watch(job)

    async def stop(self, job: SolveJob) -> None:
        """End the job with the best placement so far, and wait for its end.

        Raises:
            StoreError: Another replica solves the job, and the store cannot pass the request on.
        """
        if self._peers and self._peers.find(job.id) is job:
            await asyncio.to_thread(self._peers.replicas.request_stop, job.id)
        else:
            self._end_with_best(job)
        await job.finished.wait()

    def client_left(self, job: SolveJob) -> None:
        """End the job of a disconnected client, unless others wait for it or want it kept.

        Clients wait in turns of some seconds. A client that just received a 202 has time to ask
        again. A job of another replica continues, since others may wait for it there.
        """
        if (
            job.wanted
            or job.waiting
            or job.finished.is_set()
            or (self._peers and self._peers.find(job.id))
        ):
            return
        left_s = job.left_waiting_s + RETURN_S - time.monotonic()
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self.client_left, job)
            return
        log.info("solve %s is stopped: its client disconnected", job.id)
        self._end_with_best(job)

    def stop_all(self) -> None:
        """End every job with the best placement so far, and accept no more.

        The next start continues those that are not done.
        """
        if self._closing:
            return
        self._closing = True
        for job in [*self._queued.all(), *self._running.values()]:
            if not self._store.database.durable:
                self._end_with_best(job)
            elif job.state == "queued":
                self._hand_on(job)
            else:
                job.continues_later = not job.stopped
                if job.worker is not None:
                    job.worker.stop()

    async def close(self) -> None:
        """End every job, and wait for the workers."""
        # The jobs end first, since their ends are still to be written.
        await super().close()
        self._writers.shutdown(wait=True)
        if self._peers:
            await self._peers.close()

    def _end_with_best(self, job: SolveJob) -> None:
        job.stopped, job.continues_later = True, False
        if job.worker is not None:
            job.worker.stop()
        elif self._queued.get(job.id) is job:
            self._queued.remove(job)
            job.answer = empty_placement(job)
            self._unsolved[job.id] = job
            self._tasks.spawn(self._store_unsolved(job), end_of=job.id)

    def _hand_on(self, job: SolveJob) -> None:
        """Leave the job to the next start, and answer its waiting clients with a 202."""
        job.continues_later = True
        job.state = "queued"
        self._queued.add(job)
        job.finish()

    def _note_load(self) -> None:
        self._metrics.running.set(len(self._running))
        self._metrics.queued.set(len(self._queued))

    def _worker(self, job: SolveJob) -> Worker[Any]:
        settings = self._settings
        loop = asyncio.get_running_loop()

        def report(incumbent: float | None, bound: float | None) -> None:
            loop.call_soon_threadsafe(job.record_progress, incumbent, bound)

        return Worker(
            SolveTask(self._solver, job.id),
            job.payload,
            report,
            # The solver should stop by itself at its time limit; the worker's limit is a safeguard.
            limit_s=min(job.question.time_limit_s, settings.max_time_limit_s) + settings.overrun_s,
            grace_s=settings.stop_grace_s,
            memory_bytes=settings.worker_memory_bytes,
        )

    def _attributes(self, job: SolveJob) -> dict[str, str]:
        return {"placer.id": job.id, "placer.objective": job.question.objective}

    def _outcome(self, job: SolveJob) -> dict[str, str | int]:
        error = {"error": job.problem.title} if job.problem is not None else {}
        return {"placer.ended": outcome_label(job), "placer.starts": job.starts, **error}

    async def _note_failure(self, job: SolveJob, error: Exception) -> None:
        if self._continues(job, error):
            return
        job.problem = problem = solve_problem(error)
        if problem.status >= 500:
            trace = error if problem.name == "defect" else None
            log.error("solve %s failed: %s", job.id, error, exc_info=trace)
        try:
            await asyncio.to_thread(self._store.fail, job.id, problem.status, problem.content())
        except Exception as unwritten:
            # Whatever the error is, the waiting clients need an answer.
            log.error(
                "failure of %s could not be written, and is kept in memory: %s", job.id, unwritten
            )

    def _continues(self, job: SolveJob, error: Exception) -> bool:
        if self._closing:
            return job.continues_later and isinstance(error, Died | Killed)
        return isinstance(error, Died) and job.starts < MAX_STARTS and not job.stopped

    def _compute(self, job: SolveJob) -> None:
        assert job.worker is not None
        if job.starts >= MAX_STARTS:
            raise Crashed(
                f"it was started {job.starts} times, and the service or its worker was killed each"
                " time"
            )
        job.starts += 1
        try:
            begun = self._begin(job)
        except StoreError as error:
            # Other replicas and restarts need the record; the client gets its answer without it.
            log.error("the start of %s could not be written: %s", job.id, error)
            begun = "mine"
        if begun == "taken":
            job.starts -= 1
            job.taken = True
            return
        if begun == "answered":
            answer = self._store.get(job.id)
            job.answer = answer.placement if answer else empty_placement(job)
            job.elsewhere = True
            return
        try:
            job.solved = job.worker.run()
        except (Died, Killed, MemoryExceeded) as error:
            job.best = job.worker.best or job.best
            if self._continues(job, error) or not _recovers(job, error, self._settings):
                raise
        job.answer = job.solved.placement if job.solved is not None else empty_placement(job)
        store_answer(job, self._store)

    def _begin(self, job: SolveJob) -> Begun:
        """Record the start, and return whether the job is still to be done here."""
        if self._peers is None:
            self._store.record_start(job.id, job.starts)
            return "mine"
        return self._peers.replicas.begin(job.id, job.starts)

    async def _store_unsolved(self, job: SolveJob) -> None:
        """Store the end of a job that was stopped before a worker started."""
        await job.is_written()
        try:
            await asyncio.to_thread(store_answer, job, self._store)
        except Exception as error:
            await self._note_failure(job, error)
        if self._unsolved.get(job.id) is job:
            del self._unsolved[job.id]
        self._finish(job)

    def _finish(self, job: SolveJob) -> None:
        if job.taken and self._peers is not None:
            # Another replica answers it; its waiting clients here follow that replica.
            del self._running[job.id]
            job.taken = False
            self._peers.watch(job)
            self._start_next()
            return
        if self._running.get(job.id) is job:
            self._metrics.solve_seconds.observe(time.monotonic() - (job.started_s or job.created_s))
        if (gap := gap_of(job)) is not None:
            self._metrics.solve_gap.observe(gap)
        if job.continues_later and job.answer is None:
            self._release(job)
            self._hand_on(job)
            return
        super()._finish(job)

    def _release(self, job: SolveJob) -> None:
        super()._release(job)
        job.best, job.solved = None, None

    def _remembers(self, job: SolveJob) -> bool:
        # The store answers for the others.
        return job.problem is not None

    def _count(self, job: SolveJob) -> None:
        self._metrics.solves.labels(outcome_label(job)).inc()

    def _retry_after_s(self) -> int:
        now = time.monotonic()
        left = [
            (job.started_s or now) + job.question.time_limit_s - now
            for job in self._running.values()
        ]
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(min(left, default=1))))


def _recovers(job: SolveJob, error: Exception, settings: Settings) -> bool:
    """Recover the answer of a job whose worker was killed, and return whether it has one.

    The answer is ``job.best``, the best placement that the worker reported; ``job.solved`` is set.
    A stopped job may also have none.
    """
    job.solved = _checked(job, str(error), settings) if job.best is not None else None
    job.recovered = job.solved is not None
    return job.recovered or (job.stopped and isinstance(error, Killed))


def _checked(job: SolveJob, reason: str, settings: Settings) -> Solved | None:
    """Return the reported placement after a check in a worker, or None if it is invalid."""
    assert job.best is not None
    job.worker = Worker(
        SolveTask(RecoveredSolver(job.best, reason), job.id),
        job.payload,
        limit_s=RECOVERY_S,
        grace_s=settings.stop_grace_s,
        memory_bytes=settings.worker_memory_bytes,
    )
    try:
        solved: Solved = job.worker.run()
    except (Refused, Crashed, Killed) as error:
        log.error("the best placement of solve %s cannot be used: %s", job.id, error)
        return None
    log.warning("solve %s is answered with its best placement so far: %s", job.id, reason)
    return solved
