"""JSON replies: compressed where the client takes it, and not sent again where the client has it."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

JSON = "application/json"
SMALLEST_BYTES = 1024
"""Less is not worth compressing."""
LARGE_BYTES = 256 * 1024
"""More is compressed in a thread: a megabyte takes tens of milliseconds, in which nobody else would
be answered."""


def json_reply(
    request: Request,
    content: bytes,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    *,
    tagged: bool = False,
) -> Response:
    """A JSON response.

    Args:
        request: what it answers.
        content: the JSON.
        status: of the response.
        headers: sent along.
        tagged: whether it carries an ETag, and is a 304 where the client has just this content.
    """
    sent = dict(headers or {})
    if tagged:
        sent["ETag"] = tag = etag(content)
        sent["Cache-Control"] = "private, no-cache"
        if has_tag(request.headers.get("if-none-match", ""), tag):
            return Response(status_code=304, headers=sent)
    if len(content) >= SMALLEST_BYTES:
        sent["Vary"] = "Accept-Encoding"
        if takes_gzip(request.headers.get("accept-encoding", "")):
            sent["Content-Encoding"] = "gzip"
            if len(content) >= LARGE_BYTES:
                return _Large(content, status, headers=sent, media_type=JSON)
            content = _compressed(content)
    return Response(content, status, headers=sent, media_type=JSON)


class _Large(Response):
    """A response that is compressed as it is sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compress it, and send it."""
        self.body = await asyncio.to_thread(_compressed, bytes(self.body))
        self.headers["Content-Length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def _compressed(content: bytes) -> bytes:
    return gzip.compress(content, 1, mtime=0)


def etag(content: bytes) -> str:
    """The same for the same content; weak, for it is sent compressed or not."""
    return f'W/"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'


def has_tag(given: str, tag: str) -> bool:
    """Whether an If-None-Match header names a tag."""
    return given.strip() == "*" or tag.removeprefix("W/") in (
        one.strip().removeprefix("W/") for one in given.split(",")
    )


def takes_gzip(given: str) -> bool:
    """Whether an Accept-Encoding header allows gzip."""
    for part in given.lower().split(","):
        name, _, options = part.partition(";")
        if name.strip() in ("gzip", "*"):
            return options.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
