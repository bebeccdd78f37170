"""Request bodies, checked without holding up other requests."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from pydantic import ValidationError

from placer.schema import Batch, Cluster, PlacementRequest
from placer.schema.base import read_json
from placer.schema.graph import ProfileRequest

from ..jobs.question import Question
from ..problem import Problem, invalid_body
from ..workers.worker import CONTEXT, end_with_parent, starting_processes

INLINE_BYTES = 192 * 1024
"""Larger bodies are checked in another process: parsing holds the interpreter, thread or not, for 2
ms per 100 KB."""

MOST_VALUES = 2_000_000
"""In a body; one of 16 MiB that means it well has half as many."""

REMEMBERED = 4096

MOST_WRITTEN_OUT = 64 * 2**20
"""Of all requests of a batch together: what they share is sent once, but held by each."""

T = TypeVar("T")


class Checker:
    """Turns bodies into questions; the same bytes are parsed once."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Question] = OrderedDict()
        self._processes: ProcessPoolExecutor | None = None

    async def check(self, body: bytes) -> Question:
        """The question in a body.

        Raises:
            Problem: the body is no PlacementRequest; it names the fault.
        """
        digest = hashlib.sha256(body).digest()
        if (question := self._known.get(digest)) is not None:
            self._known.move_to_end(digest)
            return question
        question = await self._run(check, body)
        self._known[digest] = question
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return question

    async def split(self, body: bytes) -> list[bytes]:
        """The requests in a batch, each as it would have been sent alone; they are not checked yet.

        Raises:
            Problem: the body is no batch; it names the fault.
        """
        return await self._run(split, body)

    async def check_graph(self, body: bytes) -> None:
        """See that a body is a ProfileRequest; what its operations are is looked at where they run.

        Raises:
            Problem: it is none; it names the fault.
        """
        await self._run(_check_graph, body)

    async def read_cluster(self, body: bytes) -> Cluster:
        """The Cluster in a body.

        Raises:
            Problem: it is none; it names the fault.
        """
        return await self._run(_read_cluster, body)

    async def _run(self, work: Callable[[bytes], T], body: bytes) -> T:
        if len(body) <= INLINE_BYTES:
            return work(body)
        _refuse_many(body)
        return await self._run_elsewhere(work, body)

    async def _run_elsewhere(self, work: Callable[[bytes], T], body: bytes) -> T:
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
            detail = f"the process that checks large bodies died on one of {len(body)} bytes; a smaller one may pass"
            raise Problem(
                503,
                "check-failed",
                "The body could not be checked",
                detail,
                headers={"Retry-After": "1"},
            ) from None

    def close(self) -> None:
        """End the process that checks large bodies."""
        if self._processes is not None:
            self._processes.shutdown(wait=False, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, work: Callable[[bytes], T], body: bytes) -> Future[T]:
    with starting_processes():
        return pool.submit(work, body)


def check(body: bytes) -> Question:
    """The question in a body.

    Raises:
        Problem: the body is no PlacementRequest; it names the fault.
    """
    try:
        request = read_json(PlacementRequest, body, strict=True)
    except ValidationError as error:
        raise invalid_body(error) from None
    return Question(
        request.content_hash(), request.objective, request.time_limit_s, request.workers
    )


def _refuse_many(body: bytes) -> None:
    """Before a body is parsed: a value takes a byte or two of it, but a hundred once it is parsed.

    How deep its values are nested the parser counts as it goes; it ends at 200.
    """
    count = sum(body.count(mark) for mark in (b",", b"[", b"{"))
    if count > MOST_VALUES:
        detail = f"the body holds some {count} values; {MOST_VALUES} are taken. A coarser granularity has fewer layers"
        raise Problem(413, "too-many-values", "The body holds too much", detail)


def _read_cluster(body: bytes) -> Cluster:
    try:
        return read_json(Cluster, body, strict=True)
    except ValidationError as error:
        raise invalid_body(error, Cluster) from None


def _check_graph(body: bytes) -> None:
    try:
        read_json(ProfileRequest, body, strict=True)
    except ValidationError as error:
        raise invalid_body(error, ProfileRequest) from None


def split(body: bytes) -> list[bytes]:
    """The requests in a batch, each as it would have been sent alone.

    Raises:
        Problem: the body is no batch, or much larger when written out; it names the fault.
    """
    try:
        batch = read_json(Batch, body, strict=True)
    except ValidationError as error:
        raise invalid_body(error, Batch) from None
    bodies, left = [], MOST_WRITTEN_OUT
    for one in batch.requests:
        try:
            bodies.append(json.dumps({**batch.shared, **one}).encode())
        except (ValueError, RecursionError) as error:
            detail = f"a number or the nesting of the batch is more than can be read: {error}"
            raise Problem(422, "invalid-request", "The request cannot be used", detail) from None
        left -= len(bodies[-1])
        if left < 0:
            raise _too_many_bytes(len(batch.requests))
    return bodies


def _too_many_bytes(count: int) -> Problem:
    detail = f"{count} requests, each with what is shared, are more than {MOST_WRITTEN_OUT} bytes; send fewer at a time"
    return Problem(413, "batch-too-large", "The batch is too large", detail)
