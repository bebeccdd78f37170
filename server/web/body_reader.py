"""Request bodies, read up to a limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from ..problem import Problem, clip
from ..settings import Settings


class BodyReader:
    """Reader of request bodies that limits the size of each and of all together.

    Many bodies at once then cannot fill the memory.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._held_bytes = 0

    @asynccontextmanager
    async def body(self, request: Request, *, optional: bool = False) -> AsyncIterator[bytes]:
        """Yield the request's body, which counts as held while the context is open.

        Args:
            request: The request.
            optional: Whether the body may be empty, without a content type.

        Raises:
            Problem: The content type is not JSON, or the body is too large, too slow, or too much
                in addition to the other bodies.
        """
        declared = request.headers.get("content-length", "0")
        if not (optional and declared == "0" and "transfer-encoding" not in request.headers):
            _require_json(request)
        self._require_small(declared)
        body = _Body()
        try:
            await self._read(request, body)
            yield bytes(body.content)
        finally:
            self._held_bytes -= len(body.content)

    async def _read(self, request: Request, body: _Body) -> None:
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                async for chunk in request.stream():
                    body.add(chunk)
                    self._held_bytes += len(chunk)
                    self._check(len(body.content))
        except TimeoutError:
            raise self._slow(len(body.content)) from None

    def _require_small(self, declared: str) -> None:
        limit = self._settings.max_body_bytes
        # Reject a too large body before it is read; ``_check`` handles undeclared sizes.
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise _too_large(limit, f" of {clip(declared, 20)} bytes")

    def _check(self, size: int) -> None:
        if size > self._settings.max_body_bytes:
            raise _too_large(self._settings.max_body_bytes)
        if self._held_bytes > self._settings.max_bodies_bytes:
            detail = "too many large bodies arrive at the same time; try again in a moment"
            headers = {"Retry-After": "1", "Connection": "close"}
            raise Problem(503, "busy", "The service is busy", detail, headers=headers)

    def _slow(self, size: int) -> Problem:
        detail = f"only {size} bytes of the body arrived within {self._settings.body_timeout_s:g} s"
        return Problem(
            408, "slow-body", "The body arrived too slowly", detail, headers={"Connection": "close"}
        )


class _Body:
    """Chunks of a body so far; a body that arrives in one chunk is not copied."""

    def __init__(self) -> None:
        self.content: bytes | bytearray = b""

    def add(self, chunk: bytes) -> None:
        if not self.content:
            self.content = chunk
        elif chunk:
            if isinstance(self.content, bytes):
                self.content = bytearray(self.content)
            self.content += chunk


def _require_json(request: Request) -> None:
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json":
        shown = repr(clip(given, 80)) if given else "not given"
        detail = (
            f"the content type is {shown}; send the request as 'Content-Type: application/json'"
        )
        raise Problem(415, "content-type", "The content type is not supported", detail)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        detail = f"the content encoding is {clip(encoding, 80)!r}; send the body without encoding"
        raise Problem(415, "content-encoding", "The content encoding is not supported", detail)


def _too_large(limit: int, size: str = "") -> Problem:
    detail = (
        f"the body{size} is longer than the limit of {limit} bytes (PLACER_MAX_BODY_BYTES)."
        " A coarser granularity makes a smaller profile"
    )
    # The rest of the body is not read, so the connection cannot be used again.
    return Problem(
        413, "body-too-large", "The body is too large", detail, headers={"Connection": "close"}
    )
