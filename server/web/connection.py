"""HTTP connections with limits on the size and the time of a request head.

The limits apply before any part of the application runs.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..observability.metrics import Metrics
from ..problem import MEDIA_TYPE, Problem
from .guard import HEADERS

MAX_HEAD_BYTES = 64 * 1024

# Seconds that a client may take for the head of a request, or be silent on a new connection.
HEAD_S = 15.0


class Connection(HttpToolsProtocol):
    """One connection with limits.

    Without them any client, even without a key, could fill the memory or hold sockets forever.

    Args:
        metrics: Counters of requests that are rejected before the application sees them.
        given: Arguments of uvicorn.
    """

    def __init__(self, *, metrics: Metrics, **given: Any) -> None:
        super().__init__(**given)
        self._metrics = metrics
        self._in_head = False
        self._heads = 0
        # Bytes received in chunks that belong entirely to one head, parsed or not.
        self._head_bytes = 0
        # Parsed bytes of the request line and the headers, whatever the chunks were.
        self._parsed_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data, and reject a head that is too large."""
        heads = self._heads
        super().data_received(data)
        if self.transport.is_closing():
            return
        # The whole chunk belongs to one unfinished head.
        if self._in_head and self._heads == heads:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large())
                return
        if self._in_head or self._all_answered():
            self._start_timer()

    def on_message_begin(self) -> None:
        """Start to count a request."""
        super().on_message_begin()
        self._in_head, self._head_bytes, self._parsed_bytes = True, 0, 0

    def on_url(self, url: bytes) -> None:
        """Count a part of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, including its separators."""
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._parsed_bytes += size
        if self._parsed_bytes > MAX_HEAD_BYTES:
            # The exception ends the parsing; ``send_400_response`` then answers.
            raise _too_large()

    def on_headers_complete(self) -> None:
        """Stop the timer, since the head is complete; ``BodyReader`` limits the body."""
        self._in_head = False
        self._heads += 1
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be parsed with a problem, like every other fault."""
        detail = "the request is not valid HTTP/1.1"
        malformed = Problem(400, "malformed-http", "The request is not HTTP", detail)
        self._refuse(_too_large() if self._parsed_bytes > MAX_HEAD_BYTES else malformed)

    def _all_answered(self) -> bool:
        """Return whether every request has been answered.

        Bytes that a client sends after its last request then do not keep the connection open.
        """
        return self.cycle is None or (
            self.cycle.response_complete and self.timeout_keep_alive_task is None
        )

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        # An earlier request on this connection is still being answered.
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()
        elif self._in_head:
            detail = f"the head of the request did not arrive within {HEAD_S:g} s"
            self._refuse(Problem(408, "slow-head", "The request arrived too slowly", detail))
        else:
            self.transport.close()

    def _refuse(self, problem: Problem) -> None:
        self._stop_timer()
        self._metrics.count_unread(problem.status)
        content = problem.content()
        sent = [
            (b"content-type", MEDIA_TYPE.encode()),
            (b"content-length", b"%d" % len(content)),
            (b"connection", b"close"),
            *HEADERS,
        ]
        lines = [b"HTTP/1.1 %d %s" % (problem.status, HTTPStatus(problem.status).phrase.encode())]
        lines += [name + b": " + value for name, value in sent]
        self.transport.write(b"\r\n".join([*lines, b"", content]))
        self.transport.close()


def _too_large() -> Problem:
    detail = f"the request line and the headers are more than {MAX_HEAD_BYTES} bytes"
    return Problem(431, "head-too-large", "The head of the request is too large", detail)
