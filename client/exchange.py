"""Exchanges with the service without I/O, shared by the sync and the async client.

An exchange is a generator. It yields a ``Call`` and receives the reply, or yields a ``Pause`` and
resumes after it. The clients only carry out calls and pauses.

    exchange ── Call ──▶ client ── HTTP ──▶ service
             ◀─ reply ──        ◀──────────
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Generator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from placer.errors import ServerError
from placer.schema.base import read_json
from placer.schema.faults import first_fault

from . import errors

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

# Statuses after which a repetition may succeed.
RETRIED = frozenset({429, 502, 503, 504})

# Statuses of the service itself, which did nothing; 502 and 504 come from a proxy.
REFUSED = frozenset({429, 503})

# Pauses between repetitions, in seconds: the first, and the longest.
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 60.0

# Additional repetitions if the service was reachable before. Pauses double, so the service has
# about half a minute to start again.
RESTART_RETRIES = 5

# Errors that occur before the service can have received anything.
NOTHING_SENT = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.UnsupportedProtocol,
)


@dataclass(frozen=True)
class Call:
    """One HTTP request.

    Attributes:
        method: ``GET``, ``POST``, ``PUT`` or ``DELETE``.
        path: Path on the service.
        content: JSON body.
        wait_s: Seconds that the service may wait on purpose, in addition to the client's timeout.
        until_s: Monotonic time after which the client gives up; it does not wait for a service that
            asks for a longer pause.
        repeatable: Whether a repetition has no further effect. Other calls are repeated only if the
            service cannot have acted on them.
        accepted: Whether the service has confirmed that it works on this. If nobody answers then,
            the service is restarting.
        again: Call to send after the connection broke while the service may have worked on this;
            the same call if None.
    """

    method: str
    path: str
    content: bytes | None = None
    wait_s: float = 0.0
    until_s: float = math.inf
    repeatable: bool = True
    accepted: bool = False
    again: Call | None = None


@dataclass(frozen=True)
class Pause:
    """Time in seconds in which the client sends nothing."""

    seconds: float


Outcome = httpx.Response | httpx.RequestError
Exchange = Generator[Call | Pause, Outcome | None, T]


@dataclass
class Sender:
    """Sender of calls to one service, with retries.

    Attributes:
        url: The service's URL, for messages.
        retries: Number of repetitions of a call that failed on the way, or was answered 429 or 503.
        answered: Whether the service has answered before. If nobody answers then, it is restarting.
    """

    url: str
    retries: int
    answered: bool = False

    def send(self, call: Call) -> Exchange[httpx.Response]:
        """Send a call, repeat it while that may help, and return the successful reply.

        Raises:
            InputError: The service finds a fault in the request.
            UnreachableError: The service cannot be reached, or the connection broke.
            TimeoutExceeded: The service did not answer in time.
            ServerError: The service cannot answer.
        """
        there = call.accepted or self.answered
        for attempt in range(self.max_retries(True) + 1):
            outcome = yield call
            assert outcome is not None
            self.answered = self.answered or isinstance(outcome, httpx.Response)
            outcome = _error_if_incomplete(outcome)
            if isinstance(outcome, httpx.Response) and outcome.is_success:
                return outcome
            away = there and isinstance(outcome, NOTHING_SENT)
            last = attempt >= self.max_retries(away) or not _may_repeat(call, outcome)
            # An error that was not NOTHING_SENT shows that a service was there.
            if isinstance(outcome, httpx.RequestError):
                there = there or not isinstance(outcome, NOTHING_SENT)
            yield Pause(self._pause_s(call, outcome, attempt, last))
            # The service may have stopped the solve when the connection broke; see ``place``.
            if call.again is not None and _connection_broke(outcome):
                call = call.again
        raise AssertionError("the last attempt returns or raises")

    def _pause_s(self, call: Call, outcome: Outcome, attempt: int, last: bool) -> float:
        """Return the pause before the next attempt, or raise the error of the last attempt."""
        if isinstance(outcome, httpx.RequestError):
            if last:
                # the service may have acted although no response arrived
                done = not call.repeatable and not isinstance(outcome, NOTHING_SENT)
                raise errors.from_transport(outcome, self.url, attempt + 1, done=done) from outcome
            return backoff_s(attempt)
        if last or outcome.status_code not in RETRIED or not _is_in_time(call, outcome):
            raise errors.from_reply(outcome)
        return max(backoff_s(attempt), retry_after_s(outcome))

    def max_retries(self, away: bool) -> int:
        """Return the maximum number of repetitions.

        Args:
            away: Whether the service was reachable before and nobody answers now: it may be
                restarting.
        """
        return self.retries + RESTART_RETRIES if away and self.retries else self.retries

    def read(self, kind: type[M], reply: httpx.Response) -> M:
        """Parse a reply.

        Raises:
            ServerError: The reply does not have the expected type.
        """
        return self.parse(kind, reply.content, reply.status_code)

    def parse(self, kind: type[M], content: bytes | str, status: int = 200) -> M:
        """Parse a text, as ``read`` does."""
        try:
            return read_json(kind, content)
        except ValidationError as error:
            raise ServerError(
                f"{self.url} is not a Placer service of this version: {first_fault(error, kind)}",
                status,
            ) from error


def is_whole(reply: httpx.Response) -> bool:
    """Return whether a reply is complete, as far as its end shows that for JSON."""
    if not reply.headers.get("Content-Type", "").startswith("application/json"):
        return True
    return reply.content.rstrip().endswith((b"}", b"]"))


def _error_if_incomplete(outcome: Outcome) -> Outcome:
    """Return the outcome, or an error in its place if it is an incomplete answer."""
    if isinstance(outcome, httpx.Response) and outcome.is_success and not is_whole(outcome):
        return httpx.RemoteProtocolError("the answer is incomplete", request=outcome.request)
    return outcome


def _connection_broke(outcome: httpx.Response | httpx.RequestError) -> bool:
    """Return whether the connection may have broken while the service worked on a call.

    It may have broken here or at a proxy.
    """
    if isinstance(outcome, httpx.Response):
        return outcome.status_code in RETRIED - REFUSED
    return not isinstance(outcome, NOTHING_SENT)


def _is_in_time(call: Call, reply: httpx.Response) -> bool:
    """Return whether the pause that the service asks for ends before the caller gives up."""
    return time.monotonic() + retry_after_s(reply) <= call.until_s or retry_after_s(reply) == 0


def _may_repeat(call: Call, outcome: httpx.Response | httpx.RequestError) -> bool:
    if isinstance(outcome, httpx.UnsupportedProtocol):
        return False
    if call.repeatable:
        return True
    if isinstance(outcome, httpx.RequestError):
        return isinstance(outcome, NOTHING_SENT)
    return outcome.status_code in REFUSED


def backoff_s(attempt: int) -> float:
    """Return a pause that doubles with each attempt, with a random share.

    Many clients then do not return at the same time.
    """
    return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0**attempt) * random.uniform(0.5, 1.0)


def retry_after_s(reply: httpx.Response) -> float:
    """Return the pause that the service asks for, given in seconds or as a date; 0 if none."""
    given: str = reply.headers.get("Retry-After", "")
    if given.isdecimal():
        seconds = float(given[:9])
    else:
        try:
            seconds = (parsedate_to_datetime(given) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return 0.0
    return min(MAX_PAUSE_S, max(0.0, seconds))
