"""Measurements of graphs that clients send, one at a time, in a worker process."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pydantic import ValidationError

from placer.errors import MissingExtraError
from placer.schema.base import read_json
from placer.schema.graph import ProfileRequest

from ..observe.metrics import Metrics
from ..observe.spans import span
from ..problem import Problem, invalid_body
from ..settings import Settings
from ..shares import Shares
from ..store.database import StoreError
from ..store.store import Store
from ..workers.worker import Crashed, Killed, Missing, OverMemory, Refused, Report, Worker

log = logging.getLogger("placer_server")

MOST_WAITING = 8
ENDED_KEPT = 100


@dataclass(eq=False)
class Measuring:
    """State of one graph from acceptance to profile.

    Attributes:
        id: Hash of the request.
        created_s: Monotonic time at which it was accepted.
        running: Whether a worker measures it.
        written: Done when it is in the store; its exception says why it could not be written.
        profile: Profile as JSON, once done.
        problem: Why there is no profile, once failed.
        ended: Set at the end.
        release: Releases the place that the client occupies.
    """

    id: str
    created_s: float = field(default_factory=time.monotonic)
    running: bool = False
    written: asyncio.Future[None] | None = None
    profile: bytes | None = None
    problem: Problem | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    release: Callable[[], None] = lambda: None


class Profiling:
    """Runner of measurements, one at a time so that they do not disturb one another's times.

    Accepted graphs stay in the store until they are measured; the next start on this node continues
    with them.
    """

    def __init__(self, settings: Settings, store: Store, metrics: Metrics) -> None:
        self._metrics = metrics
        self._settings = settings
        self._store = store
        self._free = asyncio.Lock()
        self._open: dict[str, Measuring] = {}
        self._ended: OrderedDict[str, Measuring] = OrderedDict()
        self._shares = Shares(
            1 + MOST_WAITING, settings.client_share, "graphs are measured or wait", retry_s=10
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._worker: Worker[bytes | Problem] | None = None
        self._closing = False

    def find(self, key: str) -> Measuring | None:
        """Return the measurement of that id that is pending or ended lately, or None."""
        return self._open.get(key) or self._ended.get(key)

    def submit(self, key: str, body: bytes, client: str) -> Measuring:
        """Measure a graph, unless its measurement is pending already.

        Raises:
            Problem: Too many graphs wait, or the service is stopping.
        """
        if (known := self._open.get(key)) is not None:
            return known
        if self._closing:
            raise _stopping()
        self._shares.take(client)
        measuring = self._take(key, body)
        measuring.release = partial(self._shares.give_back, client)
        writing = asyncio.to_thread(self._store.accept_graph, key, self._settings.node_name, body)
        measuring.written = asyncio.ensure_future(writing)
        return measuring

    async def resume(self) -> None:
        """Continue graphs that another service on this node left unmeasured; check repeatedly."""
        while not self._closing:
            try:
                left = await asyncio.to_thread(self._store.take_graphs, self._settings.node_name)
            except StoreError as error:
                log.error("graphs that were left could not be looked for: %s", error)
                left = []
            for key, body in left:
                if key not in self._open:
                    log.info(
                        "graph %s was accepted by another start of the service and goes on", key
                    )
                    self._take(key, body)
            await asyncio.sleep(self._settings.lease_s / 4)

    def _take(self, key: str, body: bytes) -> Measuring:
        self._ended.pop(key, None)
        measuring = self._open[key] = Measuring(key)
        task = asyncio.create_task(self._run(measuring, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return measuring

    async def close(self) -> None:
        """End the running measurement, and wait for its end."""
        self._closing = True
        if self._worker is not None:
            self._worker.stop()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, measuring: Measuring, body: bytes) -> None:
        async with self._free:
            measuring.running = True
            with span("placer.profile", {"placer.id": measuring.id}) as told:
                await self._end(measuring, body)
                if measuring.problem is not None:
                    told["error"] = measuring.problem.title
        self._metrics.profiles.labels("failed" if measuring.problem else "answered").inc()
        del self._open[measuring.id]
        self._ended[measuring.id] = measuring
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)
        measuring.release()
        measuring.ended.set()

    async def _end(self, measuring: Measuring, body: bytes) -> None:
        """Measure the graph, and store the outcome."""
        node = self._settings.node_name
        if measuring.written is not None:
            # Otherwise the row could be written after the end, and never be deleted.
            await asyncio.wait([measuring.written])
        try:
            measuring.profile = await self._measure(body)
            await asyncio.to_thread(
                self._store.keep_measured, measuring.id, node, measuring.profile
            )
        except Problem as problem:
            measuring.problem = problem
            # While the service stops, the row stays for the next start.
            if not self._closing:
                await self._drop(measuring.id, node)
        except StoreError as error:
            log.error(
                "profile %s could not be written, and is kept in memory: %s", measuring.id, error
            )
        except Exception as error:
            log.exception("graph %s could not be measured", measuring.id)
            measuring.problem = _not_measured(str(error))

    async def _drop(self, key: str, node: str) -> None:
        try:
            await asyncio.to_thread(self._store.drop_graph, key, node)
        except StoreError as error:
            log.error("the end of graph %s could not be written: %s", key, error)

    async def _measure(self, body: bytes) -> bytes:
        if self._closing:
            raise _stopping()
        settings = self._settings
        self._worker = Worker(
            profile_graph,
            body,
            lambda *_: None,
            limit_s=settings.profile_timeout_s,
            grace_s=0.0,
            memory_bytes=settings.profile_memory_bytes,
        )
        try:
            result = await asyncio.to_thread(self._worker.run)
        except Missing as error:
            raise Problem(501, "cannot-measure", "This node cannot measure", str(error)) from error
        except Refused as error:
            raise Problem(
                422, "invalid-graph", "The graph cannot be measured", str(error)
            ) from error
        except Killed as error:
            if self._closing:
                raise _stopping() from error
            limit = f"{settings.profile_timeout_s:g} s (PLACER_PROFILE_TIMEOUT_S)"
            detail = f"the graph took more than {limit}; send a smaller one"
            raise Problem(422, "too-slow", "The graph takes too long", detail) from error
        except OverMemory as error:
            detail = f"the graph took more than {settings.profile_memory_bytes} bytes (PLACER_PROFILE_MEMORY_BYTES)"
            raise Problem(422, "too-large", "The graph takes too much memory", detail) from error
        except Crashed as error:
            log.error("a graph could not be measured: %s", error)
            raise _not_measured(str(error)) from error
        finally:
            self._worker = None
        if isinstance(result, Problem):
            raise result
        return result


def profile_graph(payload: bytes, report: Report, stop: threading.Event) -> bytes | Problem:
    """Replay a graph and return its Profile as JSON, or the body's problem.

    Only this task's process imports torch, and only for a valid graph.

    Raises:
        MissingExtraError: torch is not installed.
    """
    try:
        request = read_json(ProfileRequest, payload)
    except ValidationError as error:
        return invalid_body(error, ProfileRequest)
    try:
        from placer.profiler.remote.replay import replay
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError(
            "torch is not installed here, so graphs cannot be measured: send them to a node that runs the image's gpu"
            " target, or pip install 'torch-placer[torch]'"
        ) from error
    return replay(request).to_json().encode()


def _stopping() -> Problem:
    detail = "the service is stopping; its next start goes on with what was accepted: ask again in a moment"
    return Problem(503, "stopping", "The service is stopping", detail, headers={"Retry-After": "5"})


def _not_measured(reason: str) -> Problem:
    detail = f"the graph could not be measured: {reason}. Other requests are not touched; asking again tries again"
    return Problem(500, "not-measured", "Measuring failed", detail)
