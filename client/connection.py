"""Base of ``Client`` and ``AsyncClient``: everything except I/O.

Client, AsyncClient   public methods; carry out calls, pauses and streams
└─ BaseClient       URL, headers and timeouts
└─ Endpoints   which calls an operation makes, in which order, with which retries
"""

from __future__ import annotations

import os
from typing import Any

import httpx

from placer.errors import InputError, kind_of
from placer.schema.versions import VERSIONS

from .endpoints import Endpoints
from .event_stream import SILENCE_S
from .exchange import Call

TIMEOUT_S = 10.0
RETRIES = 4
_LAST_PORT = 65_535
_LONGEST_TIMEOUT_S = 1e6  # eleven days; the system's timers cannot wait for ever

HEADERS = {
    "Content-Type": "application/json",
    "Accept": "application/json, application/problem+json,"
    " text/event-stream;q=0.9, text/html;q=0.8",
    "Placer-Schema-Version": ", ".join(VERSIONS),
}


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
        InputError: No server is given, its URL is invalid, the key cannot be sent, or a number is
            out of range.
    """

    def __init__(self, server: str | None, timeout: float, retries: int, key: str | None) -> None:
        self.url = url_of(server)
        self._headers = request_headers(key)
        _require_numbers(timeout, retries)
        self._endpoints = Endpoints(self.url, retries)
        self._timeout_s = timeout

    def _arguments(self, call: Call) -> dict[str, Any]:
        """Return httpx's arguments for a call."""
        # The time that the service waits on purpose is added.
        timeout = httpx.Timeout(self._timeout_s, read=self._timeout_s + call.wait_s)
        arguments = {"method": call.method, "url": call.path, "content": call.content}
        return {**arguments, "timeout": timeout}

    def _stream_arguments(self, path: str) -> dict[str, Any]:
        """Return httpx's arguments for an event stream, which may be silent between its beats."""
        timeout = httpx.Timeout(self._timeout_s, read=max(self._timeout_s, SILENCE_S))
        return {"method": "GET", "url": path, "timeout": timeout}


def request_headers(key: str | None) -> dict[str, str]:
    """Return the headers of every request.

    Raises:
        InputError: The key cannot be sent.
    """
    given = os.environ.get("PLACER_KEY", "") if key is None else key
    if not given:
        return HEADERS
    if not isinstance(given, str):
        raise InputError(
            f"the key is {kind_of(given)}; give the text that was printed when the key was made"
        )
    if not given.isascii() or not given.isprintable():
        raise InputError(
            "the key has characters that cannot be sent; give the text that was printed when the"
            " key was made"
        )
    return {**HEADERS, "Authorization": f"Bearer {given}"}


def _require_numbers(timeout: Any, retries: Any) -> None:
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout <= _LONGEST_TIMEOUT_S:
        raise InputError(
            f"timeout is {timeout!r:.80}; give seconds above 0, at most {_LONGEST_TIMEOUT_S:g}"
        )
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise InputError(f"retries is {retries!r:.80}; give a whole number from 0")


def url_of(server: str | None) -> str:
    """Return the service's URL without a trailing slash.

    Raises:
        InputError: No URL is given, or it is invalid.
    """
    given = server or os.environ.get("PLACER_URL", "")
    if not given:
        raise InputError("no server is given: pass server='http://host:8080', or set PLACER_URL")
    if not isinstance(given, str):
        raise InputError(
            f"server is {kind_of(given)}; give a URL as text, such as 'http://host:8080'"
        )
    try:
        url = httpx.URL(given)
        host = url.host  # decodes an internationalised name, which may be malformed
        # The system's resolver encodes the name again, and refuses empty and long labels.
        url.raw_host.decode("ascii").encode("idna")
    except (httpx.InvalidURL, UnicodeError) as error:
        raise InputError(
            f"server {given!r} is not a URL: {error}; an example is 'http://host:8080'"
        ) from error
    if url.scheme not in ("http", "https") or not host or (url.port or 0) > _LAST_PORT:
        raise InputError(
            f"server {given!r} is not the URL of a service; an example is 'http://host:8080'"
        )
    if url.query or url.fragment or url.path.rstrip("/").endswith("/v1"):
        raise InputError(
            f"server {given!r} is the URL of a part of the service; leave out /v1 and what follows"
            " '?' or '#': an example is 'http://host:8080'"
        )
    return given.rstrip("/")


def require_open(http: httpx.Client | httpx.AsyncClient) -> None:
    """Raise if the client is closed.

    Raises:
        InputError: The client is closed.
    """
    if http.is_closed:
        raise InputError(
            f"this client of {str(http.base_url).rstrip('/')} is closed; make another client"
        )
