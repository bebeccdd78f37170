"""A solve as it goes, as server-sent events.

    event: progress     data: {"id", "status", "incumbent", "bound", "gap", "elapsed_s"}
    event: done         data: the Placement
    event: failed       data: the problem
    event: handed-on    data: the progress; the service stops, and its next start goes on with the solve

The last three end the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..jobs.job import Job
from ..problem import MEDIA_TYPE as PROBLEM
from ..problem import Problem
from ..shares import Shares
from .placements import progress_of, stored_response
from .service import OnDisconnect, Service, Serving, checked_id, client_of

router = APIRouter()

EVENTS = "text/event-stream"
EVENT = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {"event": {"enum": ["progress", "done", "failed", "handed-on"]}, "data": {}},
}
"""What the OpenAPI document says of each."""

HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
SHORTEST_S = 0.05
"""Between two events; a solver that finds much is told of in its latest."""

BEAT_S = 10.0
"""So often something is sent, so that a client which went away is noticed and proxies keep the
connection."""


@router.get(
    "/v1/placements/{id}/events",
    response_class=StreamingResponse,
    responses={200: {"content": {EVENTS: {"schema": EVENT}}, "description": "A stream of events."}},
)
async def get_events(
    request: Request, id: str, service: Serving, on_disconnect: OnDisconnect = "keep"
) -> Response:
    """Incumbent, bound and time of a solve as they change, and its end, as server-sent events."""
    key = checked_id(id)
    job = await service.jobs.seek(key)
    if job is None:
        reply = await stored_response(request, service, key, plain=True)
        kind = "failed" if reply.media_type == PROBLEM else "done"
        return Response(event(kind, bytes(reply.body)), headers=HEADERS, media_type=EVENTS)
    return _Stream(_told(service, job, on_disconnect), service.streams, client_of(request))


class _Stream(StreamingResponse):
    """A stream that holds its client's place for as long as it is open."""

    def __init__(self, content: AsyncIterator[bytes], shares: Shares, client: str) -> None:
        super().__init__(content, headers=HEADERS, media_type=EVENTS)
        self._shares, self._client = shares, client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, or refuse to: where the client, or all together, have too many open."""
        try:
            with self._shares.held(self._client):
                await super().__call__(scope, receive, send)
        except Problem as problem:
            await problem.response()(scope, receive, send)


async def _told(service: Service, job: Job, on_disconnect: str) -> AsyncIterator[bytes]:
    job.waiting += 1
    try:
        with job.watched() as changed:
            last = b""
            while not job.finished.is_set():
                if (told := event("progress", progress(job))) != last:
                    yield told
                    last = told
                if not await _soon(changed):
                    yield b": still there\n\n"
                    continue
                changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(SHORTEST_S):
                        await job.finished.wait()
        yield _end(job)
    finally:
        job.waiting -= 1
        if on_disconnect == "stop":
            service.jobs.leave(job)


async def _soon(changed: asyncio.Event) -> bool:
    """Whether something changes before the next beat."""
    with suppress(TimeoutError):
        async with asyncio.timeout(BEAT_S):
            await changed.wait()
    return changed.is_set()


def progress(job: Job) -> bytes:
    """How far a job is, as JSON."""
    return progress_of(job).model_dump_json().encode()


def event(kind: str, data: bytes) -> bytes:
    """One server-sent event; the data is JSON on one line."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


def _end(job: Job) -> bytes:
    if job.problem is not None:
        return event("failed", job.problem.content())
    if job.answer is not None:
        return event("done", job.answer)
    return event("handed-on", progress(job))
