"""Connections that break before their answer, when the test says so and not after a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import Any

import httpx


@contextmanager
def waiting_for_answer(request: httpx.Request) -> Iterator[None]:
    """Send a request, and break its connection at the end of the block."""
    with closing(HTTPConnection(request.url.host, request.url.port)) as connection:
        path = request.url.raw_path.decode()
        connection.request(request.method, path, request.read(), dict(request.headers))
        yield


def post(url: str, content: Any) -> httpx.Request:
    """Return a POST request with JSON content."""
    headers = {"Content-Type": "application/json"}
    return httpx.Request("POST", url, content=json.dumps(content).encode(), headers=headers)


class Breaking(httpx.BaseTransport):
    """Transport that breaks connections, and passes the requests after them on.

    Args:
        breaks: For each connection to break, a wait before it breaks and a wait after it.
    """

    def __init__(self, *breaks: tuple[Callable[[], Any], Callable[[], Any]]) -> None:
        self._breaks = list(breaks)
        self._passing = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if not self._breaks:
            return self._passing.handle_request(request)
        before, after = self._breaks.pop(0)
        with waiting_for_answer(request):
            before()
        after()
        raise httpx.ReadError("broken")

    def close(self) -> None:
        self._passing.close()


class Counting(httpx.AsyncBaseTransport):
    """Transport that counts the answers."""

    def __init__(self) -> None:
        self.answers = 0
        self._passing = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._passing.handle_async_request(request)
        self.answers += 1
        return response

    async def aclose(self) -> None:
        await self._passing.aclose()
