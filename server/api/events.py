"""Route that streams the progress of a solve as server-sent events.

    event: progress     data: {"id", "status", "incumbent", "bound", "gap", "elapsed_s"}
    event: done         data: the Placement
    event: failed       data: the problem
    event: handed-on    data: the progress; the service stops, and its next start continues

Each of the last three ends the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from placer.schema import Progress

from ..jobs.job import SolveJob
from ..problem import MEDIA_TYPE as PROBLEM
from ..problem import Problem
from ..quota import Quota
from .placements import job_progress, stored_response
from .service import OnDisconnect, Service, Serving, client_name, valid_id

router = APIRouter()

EVENTS = "text/event-stream"

# Schema of an event in the OpenAPI document.
EVENT = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {"event": {"enum": ["progress", "done", "failed", "handed-on"]}, "data": {}},
}

# nginx would otherwise buffer the events instead of passing them on.
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

# Shortest time between two events in seconds; the latest state is sent.
MIN_INTERVAL_S = 0.05

# Interval in seconds after which a comment is sent if nothing changed. It reveals clients that
# disconnected, and keeps proxies from closing the connection.
HEARTBEAT_S = 10.0


@router.get(
    "/v1/placements/{id}/events",
    response_class=StreamingResponse,
    responses={
        200: {"content": {EVENTS: {"schema": EVENT}}, "description": "The stream of events."}
    },
)
async def get_events(
    request: Request, id: str, service: Serving, on_disconnect: OnDisconnect = "keep"
) -> Response:
    """Stream the progress of a solve, and its end, as server-sent events.

    A `progress` event holds the best objective value, the proven bound and the elapsed time in
    seconds. The stream ends with `done`, `failed` or `handed-on`.
    """
    key = valid_id(id)
    job = await service.solves.find_anywhere(key)
    if job is None:
        reply = await stored_response(request, service, key, plain=True)
        kind = "failed" if reply.media_type == PROBLEM else "done"
        return Response(event(kind, bytes(reply.body)), headers=HEADERS, media_type=EVENTS)
    return _Stream(
        _event_stream(service, job, on_disconnect), service.stream_quota, client_name(request)
    )


class _Stream(StreamingResponse):
    """Event stream that occupies its client's place while it is open."""

    def __init__(self, content: AsyncIterator[bytes], quota: Quota, client: str) -> None:
        super().__init__(content, headers=HEADERS, media_type=EVENTS)
        self._quota, self._client = quota, client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, or a 429 if the client, or all clients together, have too many open."""
        try:
            with self._quota.held(self._client):
                await super().__call__(scope, receive, send)
        except Problem as problem:
            await problem.response()(scope, receive, send)


async def _event_stream(
    service: Service, job: SolveJob, on_disconnect: str
) -> AsyncIterator[bytes]:
    job.waiting += 1
    try:
        with job.watched() as changed:
            last = b""
            while not job.finished.is_set():
                if (current := event("progress", job_progress(job))) != last:
                    yield current
                    last = current
                if not await _changes_soon(changed):
                    yield b": still there\n\n"
                    continue
                changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(MIN_INTERVAL_S):
                        await job.finished.wait()
        yield _final_event(job)
    finally:
        # Reached at the end of the stream and when the client disconnects.
        job.waiting -= 1
        if on_disconnect == "stop":
            service.solves.client_left(job)


async def _changes_soon(changed: asyncio.Event) -> bool:
    """Return whether something changes before the next heartbeat."""
    with suppress(TimeoutError):
        async with asyncio.timeout(HEARTBEAT_S):
            await changed.wait()
    return changed.is_set()


def event(kind: str, data: bytes | Progress) -> bytes:
    """Return a server-sent event; the data is JSON on one line."""
    content = data if isinstance(data, bytes) else data.model_dump_json().encode()
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), content)


def _final_event(job: SolveJob) -> bytes:
    if job.problem is not None:
        return event("failed", job.problem.content())
    if job.answer is not None:
        return event("done", job.answer)
    return event("handed-on", job_progress(job))
