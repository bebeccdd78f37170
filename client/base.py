"""Base of ``Client`` and ``AsyncClient``: everything except I/O.

Client, AsyncClient   public methods; carry out calls, pauses and streams
└─ BaseClient       URL, headers and timeouts
└─ Endpoints   which calls an operation makes, in which order, with which retries
"""

from __future__ import annotations

from typing import Any

import httpx

from .connection import request_headers, url_of
from .endpoints import Endpoints
from .event_stream import SILENCE_S
from .exchange import Call


class BaseClient:
    """Configuration of a client.

    Args:
        server: The service's URL; ``PLACER_URL`` from the environment if None.
        timeout: Seconds that connecting, sending or receiving may take.
        retries: Number of repetitions of a request.
        key: Bearer key; ``PLACER_KEY`` from the environment if None.

    Attributes:
        url: The service's URL.

    Raises:
        InputError: No server is given, its URL is invalid, or the key cannot be sent.
    """

    def __init__(self, server: str | None, timeout: float, retries: int, key: str | None) -> None:
        self.url = url_of(server)
        self._headers = request_headers(key)
        self._endpoints = Endpoints(self.url, retries)
        self._timeout_s = timeout

    def _arguments(self, call: Call) -> dict[str, Any]:
        """Return httpx's arguments for a call."""
        # the time that the service waits on purpose is added
        timeout = httpx.Timeout(self._timeout_s, read=self._timeout_s + call.wait_s)
        return {
            "method": call.method,
            "url": call.path,
            "content": call.content,
            "timeout": timeout,
        }

    def _stream_arguments(self, path: str) -> dict[str, Any]:
        """Return httpx's arguments for an event stream, which may be silent between its beats."""
        timeout = httpx.Timeout(self._timeout_s, read=max(self._timeout_s, SILENCE_S))
        return {"method": "GET", "url": path, "timeout": timeout}
