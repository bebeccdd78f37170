"""The job runner of the solves.

submit ──▶ queued ──▶ running ──▶ done | failed
              └────── stop ──────▶ done, with the best placement so far
              └──── shutdown ────▶ continued by the next start
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..observe.metrics import Metrics
from ..observe.spans import span
from ..settings import Settings
from ..store.database import StoreError
from ..store.replicas import Begun
from ..store.store import Accepted, Store
from ..workers.solving import Solver, SolveTask
from ..workers.worker import Crashed, Died, Killed, OverMemory, Worker
from .ends import (
    Elsewhere,
    gap_of,
    how_it_ended,
    keep,
    nothing_found,
    problem_of,
    queue_full,
    refuse_excess,
    stopping,
    told_of,
)
from .job import Job
from .peers import Peers
from .question import Question
from .queue import FairQueue
from .rescue import is_rescued
from .tasks import Tasks

log = logging.getLogger("placer_server")

MAX_RETRY_AFTER_S = 30

# Seconds within which a waiting client asks again after a 202: a round trip and a margin.
RETURN_S = 1.0

FAILURES_KEPT = 1000

# Threads that write accepted requests, if the store takes several at a time.
_WRITERS = 4

# Maximum attempts of a job whose worker or service was killed each time.
MAX_STARTS = 3


class Jobs:
    """Runner of the solves: at most ``settings.workers`` run, and at most ``settings.queue`` wait.

    Call all methods in the event loop.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        metrics: Metrics,
        solver: Solver,
        peers: Peers | None = None,
    ) -> None:
        self._settings = settings
        self._peers = peers
        self._store = store
        self._metrics = metrics
        self._task = SolveTask(solver)
        self._threads = ThreadPoolExecutor(settings.workers, thread_name_prefix="placer-solve")
        writers = _WRITERS if store.database.remote else 1
        self._writers = ThreadPoolExecutor(writers, thread_name_prefix="placer-accept")
        self._running: dict[str, Job] = {}
        self._queued = FairQueue()
        # Jobs that were stopped before a worker started; their end is being written.
        self._unsolved: dict[str, Job] = {}
        self._failed: OrderedDict[str, Job] = OrderedDict()
        self._tasks = Tasks()
        self._closing = False

    def find(self, key: str) -> Job | None:
        """Return the job of that id, or None.

        It is queued, runs, failed lately, or is watched while another replica solves it.
        """
        watched = self._peers.find(key) if self._peers else None
        here = self._queued.get(key) or self._running.get(key) or self._unsolved.get(key)
        return here or watched or self._failed.get(key)

    async def seek(self, key: str) -> Job | None:
        """Return the job of that id, even if only another replica knows it.

        Raises:
            StoreError: The job is not here, and the store cannot be used.
        """
        job = self.find(key)
        return await self._peers.seek(key) if job is None and self._peers else job

    def submit(self, question: Question, payload: bytes, client: str = "") -> Job:
        """Return the job that answers the question: an existing one or a new one.

        Raises:
            Problem: The question exceeds a limit, the queue is full, or the service is stopping.
        """
        job = self.find(question.id)
        if job is not None and job.state != "failed" and not job.stopped:
            return job
        if self._closing:
            raise stopping()
        refuse_excess(question, self._settings)
        self._refuse_overflow(client)
        job = Job(question, payload, client)
        asked = Accepted(question.id, client, question.objective, question.time_limit_s, payload)
        job.written = self._accept(asked)
        job.written.add_done_callback(lambda future: self._note_written(job, future))
        self._take(job)
        return job

    def _accept(self, asked: Accepted) -> asyncio.Future[bool]:
        """Write a request to the store, after the end of an earlier stopped job with the same id.

        The end of the earlier job deletes the row of that id.
        """
        before = self._tasks.end_of(asked.id)
        if before is not None:
            return self._tasks.spawn(self._accept_after(before, asked))
        return asyncio.get_running_loop().run_in_executor(self._writers, self._store.accept, asked)

    async def _accept_after(self, before: asyncio.Task[Any], asked: Accepted) -> bool:
        await asyncio.wait([before])
        return await asyncio.get_running_loop().run_in_executor(
            self._writers, self._store.accept, asked
        )

    def resume(self) -> None:
        """Continue accepted jobs without an answer, one by one as workers become free.

        An in-memory store has none.
        """
        if self._peers:
            self._peers.start(self)

    @property
    def away(self) -> str:
        """Reason why the shared store cannot be used; empty if it can."""
        return self._peers.away if self._peers else ""

    def room(self) -> int:
        """Return the number of jobs that could start now."""
        return (
            0
            if self._closing
            else max(0, self._settings.workers - len(self._running) - len(self._queued))
        )

    def running(self) -> list[Job]:
        """Return the jobs that have a worker."""
        return list(self._running.values())

    def adopt(self, left: Accepted, job: Job | None) -> None:
        """Solve a job that another replica left; its watchers here wait for this job."""
        if job is None:
            question = Question(left.id, left.objective, left.time_limit_s)  # type: ignore[arg-type]
            job = Job(question, b"", left.client, wanted=True)
        job.payload, job.starts, job.state = left.request, left.starts, "queued"
        if self._queued.get(left.id) is None and left.id not in self._running:
            self._take(job)

    def end(self, key: str) -> None:
        """End a job with the best placement so far, because another replica asked for it."""
        job = self._queued.get(key) or self._running.get(key)
        if job is not None and not job.stopped:
            self._tell(job)

    def _note_written(self, job: Job, future: asyncio.Future[bool]) -> None:
        key = job.question.id
        if future.cancelled():
            return
        if (error := future.exception()) is not None:
            log.error("request %s could not be written; a crash would lose it: %s", key, error)
        elif not future.result() and self._peers and self._queued.get(key) is job:
            self._queued.remove(job)
            self._peers.watch(job)

    def _take(self, job: Job) -> None:
        self._failed.pop(job.question.id, None)
        self._queued.add(job)
        self._start_next()

    async def stop(self, job: Job) -> None:
        """End the job with the best placement so far, and wait for its end.

        Raises:
            StoreError: Another replica solves the job, and the store cannot pass the request on.
        """
        if self._peers and self._peers.find(job.question.id) is job:
            await asyncio.to_thread(self._peers.replicas.ask_stop, job.question.id)
        else:
            self._tell(job)
        await job.finished.wait()

    def leave(self, job: Job) -> None:
        """End the job of a disconnected client, unless others wait for it or want it kept.

        Clients wait in turns of some seconds. A client that just received a 202 has time to ask
        again. A
        job of another replica continues, since others may wait for it there.
        """
        if (
            job.wanted
            or job.waiting
            or job.finished.is_set()
            or (self._peers and self._peers.find(job.question.id))
        ):
            return
        left_s = job.left_waiting_s + RETURN_S - time.monotonic()
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self.leave, job)
            return
        log.info("solve %s is stopped: its client went away", job.question.id)
        self._tell(job)

    def stop_all(self) -> None:
        """End every job with the best placement so far, and accept no more.

        The next start continues those that are not done.
        """
        if self._closing:
            return
        self._closing = True
        for job in [*self._queued.all(), *self._running.values()]:
            if not self._store.database.durable:
                self._tell(job)
            elif job.state == "queued":
                self._hand_on(job)
            else:
                job.handed_on = not job.stopped
                if job.worker is not None:
                    job.worker.stop()

    async def close(self) -> None:
        """End every job, and wait for the workers."""
        self.stop_all()
        await self._tasks.wait()
        self._threads.shutdown(wait=True)
        self._writers.shutdown(wait=True)
        if self._peers:
            await self._peers.close()

    def _tell(self, job: Job) -> None:
        job.stopped, job.handed_on = True, False
        if job.worker is not None:
            job.worker.stop()
        elif self._queued.get(job.question.id) is job:
            self._queued.remove(job)
            job.answer = nothing_found(job)
            self._unsolved[job.question.id] = job
            self._tasks.spawn(self._keep_unsolved(job), end_of=job.question.id)

    def _hand_on(self, job: Job) -> None:
        """Leave the job to the next start, and answer its waiting clients with a 202."""
        job.handed_on = True
        job.state = "queued"
        self._queued.add(job)
        job.finished.set()
        job.wake()

    def _start_next(self) -> None:
        if self._closing:
            return
        while (
            len(self._running) < self._settings.workers
            and (job := self._queued.pop(self._running)) is not None
        ):
            self._running[job.question.id] = job
            job.worker = self._worker(job)
            job.state, job.started_s = "running", time.monotonic()
            self._tasks.spawn(self._run(job), end_of=job.question.id)
            job.wake()
        self._metrics.running.set(len(self._running))
        self._metrics.queued.set(len(self._queued))

    def _worker(self, job: Job) -> Worker[Any]:
        settings = self._settings
        loop = asyncio.get_running_loop()

        def report(incumbent: float | None, bound: float | None) -> None:
            loop.call_soon_threadsafe(job.note, incumbent, bound)

        return Worker(
            self._task,
            job.payload,
            report,
            limit_s=min(job.question.time_limit_s, settings.max_time_limit_s) + settings.overrun_s,
            grace_s=settings.stop_grace_s,
            memory_bytes=settings.worker_memory_bytes,
        )

    async def _run(self, job: Job) -> None:
        about = {"placer.id": job.question.id, "placer.objective": job.question.objective}
        with span("placer.solve", about, job.context) as told:
            await self._work(job)
            told |= told_of(job)

    async def _work(self, job: Job) -> None:
        loop = asyncio.get_running_loop()
        # Otherwise the row could be written after the answer, and never be deleted.
        await job.is_written()
        while True:
            try:
                await loop.run_in_executor(self._threads, self._solve, job)
            except Died as error:
                if self._goes_on(job, error) and not self._closing:
                    log.warning("solve %s is tried again: %s", job.question.id, error)
                    job.worker = self._worker(job)
                    continue
                await self._note_failure(job, error)
            except Elsewhere:
                self._give_away(job)
                return
            except Exception as error:
                await self._note_failure(job, error)
            break
        self._finish(job)

    def _give_away(self, job: Job) -> None:
        """Follow a job that another replica took before a worker here started."""
        assert self._peers is not None
        self._running.pop(job.question.id, None)
        self._peers.watch(job)
        self._start_next()

    async def _note_failure(self, job: Job, error: Exception) -> None:
        if self._goes_on(job, error):
            return
        job.problem = problem = problem_of(error)
        if problem.status >= 500:
            trace = error if problem.name == "defect" else None
            log.error("solve %s failed: %s", job.question.id, error, exc_info=trace)
        try:
            await asyncio.to_thread(
                self._store.fail, job.question.id, problem.status, problem.content()
            )
        except Exception as unwritten:
            # Whatever the error is, the waiting clients need an answer.
            log.error(
                "failure of %s could not be written, and is kept in memory: %s",
                job.question.id,
                unwritten,
            )

    def _goes_on(self, job: Job, error: Exception) -> bool:
        """Return whether the job continues after this error: at the next start or in a new worker."""
        if self._closing:
            return job.handed_on and isinstance(error, Died | Killed)
        return isinstance(error, Died) and job.starts < MAX_STARTS and not job.stopped

    def _solve(self, job: Job) -> None:
        """Run the worker of a job, in the calling thread, and store the answer."""
        assert job.worker is not None
        if job.starts >= MAX_STARTS:
            raise Crashed(
                f"it was begun {job.starts} times, and the service or its worker was killed each time"
            )
        job.starts += 1
        try:
            if self._begin(job) == "answered":
                job.answer, job.elsewhere = self._stored_answer(job), True
                return
        except StoreError as error:
            log.error("the start of %s could not be written: %s", job.question.id, error)
        try:
            job.solved = job.worker.run()
        except (Died, Killed, OverMemory) as error:
            job.best = job.worker.best or job.best
            if self._goes_on(job, error) or not is_rescued(job, error, self._settings):
                raise
        job.answer = job.solved.placement if job.solved is not None else nothing_found(job)
        keep(job, self._store)

    def _begin(self, job: Job) -> Begun:
        if self._peers is None:
            self._store.started(job.question.id, job.starts)
            return "mine"
        begun = self._peers.replicas.begin(job.question.id, job.starts)
        if begun == "taken":
            job.starts -= 1
            raise Elsewhere
        return begun

    def _stored_answer(self, job: Job) -> bytes:
        """Return the answer that another replica has just stored."""
        answer = self._store.get(job.question.id)
        return answer.placement if answer else nothing_found(job)

    async def _keep_unsolved(self, job: Job) -> None:
        await job.is_written()
        try:
            await asyncio.to_thread(keep, job, self._store)
        except Exception as error:
            await self._note_failure(job, error)
        if self._unsolved.get(job.question.id) is job:
            del self._unsolved[job.question.id]
        self._finish(job)

    def _finish(self, job: Job) -> None:
        key = job.question.id
        if self._running.get(key) is job:
            del self._running[key]
            self._metrics.solve_seconds.observe(time.monotonic() - (job.started_s or job.created_s))
        if (gap := gap_of(job)) is not None:
            self._metrics.solve_gap.observe(gap)
        job.payload, job.best, job.solved = b"", None, None
        # Break the reference cycle between the job and its worker.
        job.worker = None
        if job.handed_on and job.answer is None:
            self._hand_on(job)
            return
        job.state = "failed" if job.problem is not None else "done"
        if job.problem is not None:
            self._failed[key] = job
            if len(self._failed) > FAILURES_KEPT:
                self._failed.popitem(last=False)
        self._metrics.solves.labels(how_it_ended(job)).inc()
        job.finished.set()
        job.wake()
        self._start_next()

    def _refuse_overflow(self, client: str) -> None:
        """Reject a job if the queue is full or the client fills its share of it."""
        settings, held = self._settings, self._queued.held_by(client)
        if len(self._running) < settings.workers:
            return
        if len(self._queued) >= settings.queue:
            what = f"{len(self._running)} solves run and {len(self._queued)} wait, which is all that this service takes"
        elif held >= math.ceil(settings.queue * settings.client_share):
            what = f"{held} solves of yours wait, which is all that one client may have (PLACER_CLIENT_SHARE)"
        else:
            return
        self._metrics.rejections.inc()
        raise queue_full(what, self._next_free_s())

    def _next_free_s(self) -> int:
        now = time.monotonic()
        left = [
            (job.started_s or now) + job.question.time_limit_s - now
            for job in self._running.values()
        ]
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(min(left, default=1))))
