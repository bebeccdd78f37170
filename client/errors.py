"""Errors of ``placer.errors`` for the service's replies and for failed connections."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx

from placer.errors import InputError, PlacerError, ServerError, TimeoutExceeded, UnreachableError

# Statuses that blame the request; a repetition would fail in the same way.
FAULTS_OF_THE_REQUEST = frozenset({400, 413, 415, 422})

MAX_TEXT = 1000


def from_reply(reply: httpx.Response) -> PlacerError:
    """Return the error of a reply: InputError if the request is at fault, else ServerError."""
    text = _detail(reply)
    if reply.status_code in FAULTS_OF_THE_REQUEST:
        return InputError(text)
    return ServerError(
        f"the service at {_origin(reply.request.url)} answered {reply.status_code}: {text}",
        reply.status_code,
    )


def from_problem(status: int, problem: Mapping[str, Any], url: str) -> PlacerError:
    """Return the error of a problem inside an answer: of a batch, or at the end of a stream."""
    text = str(problem.get("detail", "it gives no reason"))[:MAX_TEXT]
    if status in FAULTS_OF_THE_REQUEST:
        return InputError(text)
    return ServerError(f"the service at {url} answered {status}: {text}", status)


def from_transport(
    error: httpx.RequestError, url: str, attempts: int, *, done: bool = False
) -> ServerError:
    """Return the error of a request that got no reply.

    Args:
        error: Error of the last attempt.
        url: The service's URL.
        attempts: Number of attempts.
        done: Whether the service may have acted although no response arrived, and the request must
            not be repeated.
    """
    reason = str(error) or type(error).__name__
    tried = f" (tried {attempts} times)" if attempts > 1 else ""
    if done:
        tried += (
            "; it may have acted although no response arrived, so check before you repeat the call"
        )
    if isinstance(error, httpx.ConnectTimeout | httpx.ConnectError):
        return UnreachableError(
            f"no service answers at {url}: {reason}{tried}; start one with 'placer serve', or set"
            " PLACER_URL"
        )
    if isinstance(error, httpx.TimeoutException):
        return TimeoutExceeded(
            f"the service at {url} did not answer in time: {reason}{tried}; give a longer timeout"
        )
    return UnreachableError(f"the connection to the service at {url} broke: {reason}{tried}")


def _detail(reply: httpx.Response) -> str:
    if reply.has_redirect_location:
        where = reply.request.url.join(reply.headers["Location"])
        return f"it moved to {where}; use that URL"[:MAX_TEXT]
    try:
        content = json.loads(reply.content)
        detail = content["detail"]
    except (ValueError, KeyError, TypeError, RecursionError):
        detail = reply.text.strip() or reply.reason_phrase
    return str(detail)[:MAX_TEXT]


def _origin(url: httpx.URL) -> str:
    return str(url.copy_with(path="/", query=None)).rstrip("/")
