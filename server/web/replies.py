"""JSON replies: compressed where the client takes it, and not sent again where the client has it."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

JSON = "application/json"
SMALLEST_BYTES = 1024
"""Less is not worth compressing."""


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
            content = gzip.compress(content, 1, mtime=0)
    return Response(content, status, headers=sent, media_type=JSON)


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
