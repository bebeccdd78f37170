"""Validation of request bodies without blocking other requests."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from placer.errors import InputError
from placer.schema import Batch, Cluster, JointRequest, PlacementRequest
from placer.schema.graph import ProfileRequest

from ..jobs.job import Question
from ..problem import Problem, invalid_request, read_body
from ..store.lru_cache import LruCache
from ..workers.worker import CONTEXT, end_with_parent, starting_processes

# Size above which bodies are checked in another process. Parsing holds the interpreter lock for 2
# ms per 100 KB, in a thread too.
INLINE_BYTES = 192 * 1024

# Largest number of values in a body; a well-formed body of 16 MiB has half as many.
MAX_VALUES = 2_000_000

MAX_KNOWN = 4096

# Largest total size in bytes of a batch's requests. Shared fields are sent once, but every request
# holds a copy.
MAX_EXPANDED_BYTES = 64 * 2**20

T = TypeVar("T")


class Validator:
    """Parser of request bodies, with a cache by content."""

    def __init__(self) -> None:
        self._known: LruCache[Question] = LruCache(MAX_KNOWN)
        self._processes: ProcessPoolExecutor | None = None

    async def check(self, body: bytes) -> Question:
        """Return the question in a body.

        Raises:
            Problem: The body is not a PlacementRequest; the problem names the fault.
        """
        # Clients may send the same body repeatedly, so keep its question by the hash.
        digest = hashlib.sha256(body).hexdigest()
        if (question := self._known.get(digest)) is None:
            question = await self.run(check, body)
            self._known.put(digest, question)
        return question

    async def run(self, work: Callable[[bytes], T], body: bytes) -> T:
        """Return what a function of this module reads in a body; see there for the errors."""
        if len(body) <= INLINE_BYTES:
            return work(body)
        _check_value_count(body)
        return await self._run_in_process(work, body)

    async def _run_in_process(self, work: Callable[[bytes], T], body: bytes) -> T:
        if self._processes is None:
            self._processes = ProcessPoolExecutor(
                1, mp_context=CONTEXT, initializer=end_with_parent
            )
        pool = self._processes
        try:
            future = await asyncio.to_thread(_submit, pool, work, body)
            return await asyncio.wrap_future(future)
        except BrokenProcessPool:
            if self._processes is pool:
                self._processes = None
            detail = (
                f"the process that checks large bodies died on a body of {len(body)} bytes; send a"
                " smaller body"
            )
            title = "The body could not be checked"
            raise Problem(503, "check-failed", title, detail, retry_s=1) from None

    def close(self) -> None:
        """End the process that checks large bodies."""
        if self._processes is not None:
            self._processes.shutdown(wait=False, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, work: Callable[[bytes], T], body: bytes) -> Future[T]:
    with starting_processes():
        return pool.submit(work, body)


def check(body: bytes) -> Question:
    """Return the question in a body.

    Raises:
        Problem: The body is not a PlacementRequest; the problem names the fault.
    """
    return _question(read_body(PlacementRequest, body))


def _question(request: PlacementRequest) -> Question:
    return Question(
        request.content_hash(), request.objective, request.time_limit_s, request.workers
    )


def check_joint(body: bytes) -> tuple[Question, bytes]:
    """Return the question in a JointRequest, and the PlacementRequest that asks it as JSON.

    Raises:
        Problem: The body is not a JointRequest; the problem names the fault.
    """
    joint = read_body(JointRequest, body)
    try:
        request = joint.placement_request()
    except InputError as error:
        # Only the joint profile shows whether constraints name existing layers.
        raise invalid_request(str(error).removeprefix("PlacementRequest: ")) from None
    return _question(request), request.model_dump_json().encode()


def _check_value_count(body: bytes) -> None:
    """Reject a body with too many values before it is parsed.

    A value takes a byte or two of the body, but a hundred bytes once it is parsed. The parser
    itself limits the nesting to 200 levels.
    """
    count = sum(body.count(mark) for mark in (b",", b"[", b"{"))
    if count > MAX_VALUES:
        detail = (
            f"the body holds about {count} values; the limit is {MAX_VALUES}. A coarser"
            " granularity gives fewer layers"
        )
        raise Problem(413, "too-many-values", "The body holds too much", detail)


def read_cluster(body: bytes) -> Cluster:
    """Return the Cluster in a body; see ``read_body`` for the errors."""
    return read_body(Cluster, body)


def check_graph(body: bytes) -> None:
    """Validate a ProfileRequest; its operations are checked where they run."""
    read_body(ProfileRequest, body)


def split(body: bytes) -> list[bytes]:
    """Return the requests of a batch, each as if sent alone.

    Raises:
        Problem: The body is not a batch, or much larger when expanded; the problem names the fault.
    """
    batch = read_body(Batch, body)
    bodies, left = [], MAX_EXPANDED_BYTES
    for one in batch.requests:
        try:
            bodies.append(json.dumps({**batch.shared, **one}).encode())
        except (ValueError, RecursionError) as error:
            detail = f"a number or the nesting of the batch is too large: {error}"
            raise invalid_request(detail) from None
        left -= len(bodies[-1])
        if left < 0:
            detail = (
                f"{len(batch.requests)} requests, each with the shared fields, have more than"
                f" {MAX_EXPANDED_BYTES} bytes; send fewer at a time"
            )
            raise Problem(413, "batch-too-large", "The batch is too large", detail)
    return bodies
