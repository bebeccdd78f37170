"""JSON replies with compression and ETags."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

JSON = "application/json"

# Size below which compression is not worth its time.
MIN_GZIP_BYTES = 1024

# Size above which a thread compresses the reply. A megabyte takes tens of milliseconds, in which
# the event loop would answer nobody.
LARGE_BYTES = 256 * 1024


def json_reply(
    request: Request,
    content: bytes,
    headers: Mapping[str, str] | None = None,
    *,
    tagged: bool = False,
) -> Response:
    """Return a JSON response.

    Args:
        request: Request to answer.
        content: The JSON.
        headers: Further headers.
        tagged: Whether to send an ETag, and a 304 if the client has this content.
    """
    sent = dict(headers or {})
    if tagged:
        sent["ETag"] = tag = etag(content)
        sent["Cache-Control"] = "private, no-cache"
        if has_tag(request.headers.get("if-none-match", ""), tag):
            return Response(status_code=304, headers=sent)
    if len(content) >= MIN_GZIP_BYTES:
        sent["Vary"] = "Accept-Encoding"
        if accepts_gzip(request.headers.get("accept-encoding", "")):
            sent["Content-Encoding"] = "gzip"
            if len(content) >= LARGE_BYTES:
                return _Large(content, headers=sent, media_type=JSON)
            content = _compressed(content)
    return Response(content, headers=sent, media_type=JSON)


class _Large(Response):
    """Response that is compressed on sending."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compress and send the response."""
        self.body = await asyncio.to_thread(_compressed, bytes(self.body))
        self.headers["Content-Length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def _compressed(content: bytes) -> bytes:
    # Without a time stamp, the same content gives the same bytes.
    return gzip.compress(content, 1, mtime=0)


def etag(content: bytes) -> str:
    """Return a weak ETag of the content; it is weak since the reply may be compressed."""
    return f'W/"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'


def has_tag(given: str, tag: str) -> bool:
    """Return whether an If-None-Match header contains the tag."""
    return given.strip() == "*" or tag.removeprefix("W/") in (
        one.strip().removeprefix("W/") for one in given.split(",")
    )


def accepts_gzip(given: str) -> bool:
    """Return whether an Accept-Encoding header allows gzip."""
    allowed = {}
    for part in given.lower().split(","):
        name, _, options = part.partition(";")
        weight = options.replace(" ", "")
        allowed[name.strip()] = weight not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    # RFC 9110, section 12.5.3: * stands for the encodings that are not named.
    return allowed.get("gzip", allowed.get("*", False))
