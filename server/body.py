"""Request bodies: read up to a limit, and checked without holding up other requests."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from placer.schema import Batch, Objective, PlacementRequest
from placer.schema.graph import ProfileRequest

from .problem import Problem, clip, invalid_body
from .settings import Settings
from .worker import CONTEXT, starting_processes

INLINE_BYTES = 192 * 1024
"""Larger bodies are checked in another process: parsing holds the interpreter, thread or not, for 2 ms per 100 KB."""

REMEMBERED = 4096

MOST_WRITTEN_OUT = 64 * 2**20
"""Of all requests of a batch together: what they share is sent once, but held by each."""

T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """What the service needs to know of a PlacementRequest that it has checked.

    Attributes:
        id: the content hash.
        objective: what is made small.
        time_limit_s: the solver's time limit.
    """

    id: str
    objective: Objective
    time_limit_s: float


class Intake:
    """Reads bodies, each up to a limit and all of them together up to another, so that many at once fill no memory."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._held_bytes = 0

    @asynccontextmanager
    async def body(self, request: Request, *, optional: bool = False) -> AsyncIterator[bytes]:
        """The request's body, which counts as held while the context is open.

        Args:
            request: whose body it is.
            optional: whether there may be none, without a content type.

        Raises:
            Problem: it is no JSON by its content type, too large, too slow, or more than fits beside the others.
        """
        declared = request.headers.get("content-length", "0")
        if not (optional and declared == "0" and "transfer-encoding" not in request.headers):
            _require_json(request)
        self._require_small(declared)
        body = bytearray()
        try:
            await self._read(request, body)
            yield bytes(body)
        finally:
            self._held_bytes -= len(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                async for chunk in request.stream():
                    body += chunk
                    self._held_bytes += len(chunk)
                    self._check(len(body))
        except TimeoutError:
            raise self._slow(len(body)) from None

    def _require_small(self, declared: str) -> None:
        limit = self._settings.max_body_bytes
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise _too_large(limit, f"{clip(declared, 20)} bytes")

    def _check(self, size: int) -> None:
        if size > self._settings.max_body_bytes:
            raise _too_large(self._settings.max_body_bytes, "more than that")
        if self._held_bytes > self._settings.max_bodies_bytes:
            detail = "too many large bodies arrive at the same time; try again in a moment"
            headers = {"Retry-After": "1", "Connection": "close"}
            raise Problem(503, "busy", "The service is busy", detail, headers=headers)

    def _slow(self, size: int) -> Problem:
        detail = f"the body did not arrive within {self._settings.body_timeout_s:g} s; {size} bytes did"
        return Problem(408, "slow-body", "The body came too slowly", detail, headers={"Connection": "close"})


def _require_json(request: Request) -> None:
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json":
        shown = repr(clip(given, 80)) if given else "not given"
        detail = f"the content type is {shown}; send the request as 'Content-Type: application/json'"
        raise Problem(415, "content-type", "The content type cannot be read", detail)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        detail = f"the content encoding is {clip(encoding, 80)!r}; send the body as it is"
        raise Problem(415, "content-encoding", "The content encoding cannot be read", detail)


def _too_large(limit: int, given: str) -> Problem:
    detail = (
        f"the body is {given}; the limit is {limit} bytes (PLACER_MAX_BODY_BYTES)."
        " A coarser granularity makes a smaller profile"
    )
    # The rest of the body is not read, so the connection cannot be used again.
    return Problem(413, "body-too-large", "The body is too large", detail, headers={"Connection": "close"})


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

    async def _run(self, work: Callable[[bytes], T], body: bytes) -> T:
        return work(body) if len(body) <= INLINE_BYTES else await self._run_elsewhere(work, body)

    async def _run_elsewhere(self, work: Callable[[bytes], T], body: bytes) -> T:
        if self._processes is None:
            self._processes = ProcessPoolExecutor(1, mp_context=CONTEXT)
        pool = self._processes
        try:
            future = await asyncio.to_thread(_submit, pool, work, body)
            return await asyncio.wrap_future(future)
        except BrokenProcessPool:
            if self._processes is pool:
                self._processes = None
            detail = f"the process that checks large bodies died on one of {len(body)} bytes; a smaller one may pass"
            raise Problem(
                503, "check-failed", "The body could not be checked", detail, headers={"Retry-After": "1"}
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
        request = PlacementRequest.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise invalid_body(error) from None
    return Question(request.content_hash(), request.objective, request.time_limit_s)


def _check_graph(body: bytes) -> None:
    try:
        ProfileRequest.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise invalid_body(error, ProfileRequest) from None


def split(body: bytes) -> list[bytes]:
    """The requests in a batch, each as it would have been sent alone.

    Raises:
        Problem: the body is no batch, or much larger when written out; it names the fault.
    """
    try:
        batch = Batch.model_validate_json(body, strict=True)
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
