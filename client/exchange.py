"""What is said to the service, in what order, written once for the sync and the async client.

An exchange is a generator: it yields a ``Call`` and is sent the reply, or yields a ``Pause`` and is
resumed after it. The clients only carry calls and pauses out.

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

RETRIED = frozenset({429, 502, 503, 504})
REFUSED = frozenset({429, 503})
"""Answered by the service itself, which did nothing; 502 and 504 come of a proxy, which knows no
more than we do."""

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 60.0

AWAY_RETRIES = 5
"""So many more where the service was there before: pauses double, so it has half a minute or so to
start again."""

NOTHING_SENT = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.UnsupportedProtocol,
)
"""Faults on the way before the service can have seen anything."""


@dataclass(frozen=True)
class Call:
    """One HTTP request.

    Attributes:
        method: ``GET``, ``POST``, ``PUT`` or ``DELETE``.
        path: on the service.
        content: the JSON body.
        wait_s: how long the service may take on purpose before it answers, on top of the client's
            timeout.
        until_s: by the monotonic clock; a service that asks to wait beyond that is not waited for.
        repeatable: whether asking twice is asking once. What is not is repeated only where nothing
            can have come of it.
        accepted: whether the service has said that it works on this; so if nobody answers, it is
            starting again.
        again: what is sent instead once the connection has broken while the service could have been
            at work on this; the same call if None.
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
    """So many seconds in which nothing is said."""

    seconds: float


Outcome = httpx.Response | httpx.RequestError
Exchange = Generator[Call | Pause, Outcome | None, T]


@dataclass
class Sender:
    """Sends calls to one service, and again while that may help.

    Attributes:
        url: of the service, for messages.
        retries: how often a call is repeated after it failed on the way, or was answered 429 or
            503.
        answered: whether the service has answered before; so if nobody does, it is starting again.
    """

    url: str
    retries: int
    answered: bool = False

    def send(self, call: Call) -> Exchange[httpx.Response]:
        """Send a call, repeat it while that may help, and return its reply if it is a good one.

        Raises:
            InputError: the service finds a fault in what was sent.
            UnreachableError: the service cannot be reached, or broke off.
            TimeoutExceeded: it did not answer in time.
            ServerError: it cannot answer.
        """
        there = call.accepted or self.answered
        for attempt in range(self.most_retries(True) + 1):
            outcome = yield call
            assert outcome is not None
            self.answered = self.answered or isinstance(outcome, httpx.Response)
            if isinstance(outcome, httpx.Response) and outcome.is_success:
                if is_whole(outcome):
                    return outcome
                outcome = httpx.RemoteProtocolError("half an answer came", request=outcome.request)
            away = there and isinstance(outcome, NOTHING_SENT)
            last = attempt >= self.most_retries(away) or not _may_repeat(call, outcome)
            if isinstance(outcome, httpx.RequestError):
                there = there or not isinstance(outcome, NOTHING_SENT)
                if last:
                    raise errors.from_transport(
                        outcome, self.url, attempt + 1, done=_done(call, outcome)
                    ) from outcome
                yield Pause(backoff_s(attempt))
            elif outcome.status_code in RETRIED and not last and _in_time(call, outcome):
                yield Pause(max(backoff_s(attempt), retry_after_s(outcome)))
            else:
                raise errors.from_reply(outcome)
            if call.again is not None and _broke(outcome):
                call = call.again
        raise AssertionError("the last attempt returns or raises")

    def most_retries(self, away: bool) -> int:
        """How often at most something is asked again.

        Args:
            away: whether the service was there before and nobody answers now: it may be starting
                again.
        """
        return self.retries + AWAY_RETRIES if away and self.retries else self.retries

    def read(self, kind: type[M], reply: httpx.Response) -> M:
        """What a reply holds.

        Raises:
            ServerError: something else.
        """
        return self.parse(kind, reply.content, reply.status_code)

    def parse(self, kind: type[M], content: bytes | str, status: int = 200) -> M:
        """What a text holds, as for ``read``."""
        try:
            return read_json(kind, content)
        except ValidationError as error:
            raise ServerError(
                f"what answers at {self.url} is no Placer service of this version: {first_fault(error, kind)}",
                status,
            ) from error


def is_whole(reply: httpx.Response) -> bool:
    """Whether a reply is not cut off, as far as can be told: its end is that of JSON, where it says
    that it is.
    """
    if not reply.headers.get("Content-Type", "").startswith("application/json"):
        return True
    return reply.content.rstrip().endswith((b"}", b"]"))


def _broke(outcome: httpx.Response | httpx.RequestError) -> bool:
    """Whether the service may have seen the connection end while it worked on a call, here or at a
    proxy.
    """
    if isinstance(outcome, httpx.Response):
        return outcome.status_code in RETRIED - REFUSED
    return not isinstance(outcome, NOTHING_SENT)


def _in_time(call: Call, reply: httpx.Response) -> bool:
    """Whether a service that asks to wait can be asked again before the caller gives up."""
    return time.monotonic() + retry_after_s(reply) <= call.until_s or retry_after_s(reply) == 0


def _may_repeat(call: Call, outcome: httpx.Response | httpx.RequestError) -> bool:
    if isinstance(outcome, httpx.UnsupportedProtocol):
        return False
    if call.repeatable:
        return True
    if isinstance(outcome, httpx.RequestError):
        return isinstance(outcome, NOTHING_SENT)
    return outcome.status_code in REFUSED


def _done(call: Call, error: httpx.RequestError) -> bool:
    """Whether the service may have done what it did not tell of, so that the caller must look."""
    return not call.repeatable and not isinstance(error, NOTHING_SENT)


def backoff_s(attempt: int) -> float:
    """Twice as long each time, and a random share of it, so that many clients do not come back at
    once.
    """
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**attempt) * random.uniform(0.5, 1.0)


def retry_after_s(reply: httpx.Response) -> float:
    """What the service asks to wait: seconds or a date; 0 if it does not say."""
    given: str = reply.headers.get("Retry-After", "")
    if given.isdecimal():
        seconds = float(given[:9])
    else:
        try:
            seconds = (parsedate_to_datetime(given) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return 0.0
    return min(LONGEST_PAUSE_S, max(0.0, seconds))
