"""HTTP connections: the head of a request is bounded in size and in time, before anything of the
application runs.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..observe.metrics import Metrics
from ..problem import MEDIA_TYPE, Problem
from .guard import HEADERS

MAX_HEAD_BYTES = 64 * 1024
HEAD_S = 15.0
"""So long a client may take for the head of a request, and for nothing at all on a new connection.
"""


class Connection(HttpToolsProtocol):
    """One connection; without these limits anybody, key or not, could fill memory or hold sockets
    for ever.

    Args:
        metrics: count what is refused before the application sees it.
        given: as uvicorn gives it.
    """

    def __init__(self, *, metrics: Metrics, **given: Any) -> None:
        super().__init__(**given)
        self._metrics = metrics
        self._in_head = False
        self._heads = 0
        self._head_bytes = 0  # of what came and was all of one head
        self._parsed_bytes = 0  # of its line and its headers, however they came
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request, but not for ever."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, and see whether it was too much of a head that goes on."""
        heads = self._heads
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head and self._heads == heads:  # so all of it was of one head
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large())
                return
        if self._in_head or self._answered():
            self._start_timer()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head, self._head_bytes, self._parsed_bytes = True, 0, 0

    def on_url(self, url: bytes) -> None:
        """A part of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, with what stands between and behind name and value."""
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._parsed_bytes += size
        if self._parsed_bytes > MAX_HEAD_BYTES:
            raise _too_large()  # ends the parsing; see ``send_400_response``

    def on_headers_complete(self) -> None:
        """Its head is here; the body has limits of its own, see ``Intake``."""
        self._in_head = False
        self._heads += 1
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What cannot be parsed, or not to its end, is told like every other fault."""
        detail = "what was sent is no HTTP/1.1 request"
        malformed = Problem(400, "malformed-http", "The request is not HTTP", detail)
        self._refuse(_too_large() if self._parsed_bytes > MAX_HEAD_BYTES else malformed)

    def _answered(self) -> bool:
        """Whether nothing is owed to the client: what it sends beyond that, if it goes on, keeps no
        connection open.
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
        # a request before it is still being answered
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()
        elif self._in_head:
            detail = f"the head of the request did not arrive within {HEAD_S:g} s"
            self._refuse(Problem(408, "slow-head", "The request came too slowly", detail))
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
