"""What is said to the service, in what order, written once for the sync and the async client.

An exchange is a generator: it yields a ``Call`` and is sent the reply, or yields a ``Pause`` and is resumed after it.
The clients only carry calls and pauses out.

    exchange ── Call ──▶ client ── HTTP ──▶ service
             ◀─ reply ──        ◀──────────
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Generator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from placer.errors import ServerError, TimeoutExceeded
from placer.schema import Cluster, Placement, PlacementRequest, Profile
from placer.schema.graph import ProfileRequest

from . import errors

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

RETRIED = frozenset({429, 502, 503, 504})
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 60.0
LONGEST_POLL_S = 20.0


@dataclass(frozen=True)
class Call:
    """One HTTP request.

    Attributes:
        method: ``GET``, ``POST`` or ``DELETE``.
        path: on the service.
        content: the JSON body.
        wait_s: how long the service may take on purpose before it answers, on top of the client's timeout.
    """

    method: str
    path: str
    content: bytes | None = None
    wait_s: float = 0.0


@dataclass(frozen=True)
class Pause:
    """So many seconds in which nothing is said."""

    seconds: float


Outcome = httpx.Response | httpx.RequestError
Exchange = Generator[Call | Pause, Outcome | None, T]


@dataclass(frozen=True)
class Health:
    """What a service says of itself.

    Attributes:
        status: ``ok``.
        version: of its Placer.
    """

    status: str
    version: str


@dataclass(frozen=True)
class Dialogue:
    """The exchanges with one service.

    Attributes:
        url: of the service, for messages.
        retries: how often a call is repeated after it failed on the way, or was answered 429 or 503. Every call may be:
            a placement is asked for by its content, so asking twice is asking once.
    """

    url: str
    retries: int

    def place(self, request: PlacementRequest, wait: float | None) -> Exchange[Placement]:
        """Ask, and ask again until the answer is there."""
        deadline = _Deadline(wait)
        reply = yield from self._send(self._waiting("POST", "/v1/placements", deadline, _body(request)))
        return (yield from self._await_placement(reply, deadline))

    def placement(self, key: str, wait: float | None) -> Exchange[Placement]:
        """Ask for a placement that was asked for before."""
        deadline = _Deadline(wait)
        reply = yield from self._send(self._waiting("GET", f"/v1/placements/{key}", deadline))
        return (yield from self._await_placement(reply, deadline))

    def stop(self, key: str) -> Exchange[Placement]:
        """End a solve with the best so far."""
        reply = yield from self._send(Call("DELETE", f"/v1/placements/{key}", wait_s=LONGEST_POLL_S))
        return self._read(Placement, reply)

    def cluster(self) -> Exchange[Cluster]:
        """Ask for the service's own devices; measuring them the first time takes a while."""
        reply = yield from self._send(Call("GET", "/v1/cluster", wait_s=300.0))
        return self._read(Cluster, reply)

    def profile(self, request: ProfileRequest, wait: float | None) -> Exchange[Profile]:
        """Have a graph measured, and ask again until its profile is there."""
        deadline = _Deadline(wait)
        content = request.model_dump_json(exclude_defaults=True).encode()

        def post() -> Call:
            return self._waiting("POST", "/v1/profiles", deadline, content)

        reply = yield from self._send(post())
        while reply.status_code == 202:
            progress = self._read(_Progress, reply)
            if deadline.left_s() <= 0:
                raise TimeoutExceeded(
                    f"profile {progress.id} is {progress.status} after {deadline.wait_s:g} s; it goes on: ask again"
                )
            try:
                reply = yield from self._send(self._waiting("GET", f"/v1/profiles/{progress.id}", deadline))
            except ServerError as error:
                if error.status != 404:
                    raise
                reply = yield from self._send(post())  # the service was killed meanwhile, and knows of it no more
        return self._read(Profile, reply)

    def health(self) -> Exchange[Health]:
        """Ask whether the service lives."""
        reply = yield from self._send(Call("GET", "/healthz"))
        return self._read(_Health, reply).health()

    def _await_placement(self, reply: httpx.Response, deadline: _Deadline) -> Exchange[Placement]:
        while reply.status_code == 202:
            progress = self._read(_Progress, reply)
            if deadline.left_s() <= 0:
                raise _still_running(progress, deadline)
            reply = yield from self._send(self._waiting("GET", f"/v1/placements/{progress.id}", deadline))
        return self._read(Placement, reply)

    @staticmethod
    def _waiting(method: str, path: str, deadline: _Deadline, content: bytes | None = None) -> Call:
        wait_s = max(0.0, min(LONGEST_POLL_S, deadline.left_s()))
        return Call(method, f"{path}?wait={wait_s:.3f}", content, wait_s)

    def _send(self, call: Call) -> Exchange[httpx.Response]:
        """Send a call, repeat it while that may help, and return its reply if it is a good one."""
        for attempt in range(self.retries + 1):
            outcome = yield call
            assert outcome is not None
            last = attempt == self.retries
            if isinstance(outcome, httpx.RequestError):
                if last or isinstance(outcome, httpx.UnsupportedProtocol):
                    raise errors.from_transport(outcome, self.url, attempt + 1) from outcome
                yield Pause(_backoff_s(attempt))
            elif outcome.status_code in RETRIED and not last:
                yield Pause(max(_backoff_s(attempt), _retry_after_s(outcome)))
            elif outcome.is_success:
                return outcome
            else:
                raise errors.from_reply(outcome)
        raise AssertionError("the last attempt returns or raises")

    def _read(self, kind: type[M], reply: httpx.Response) -> M:
        try:
            return kind.model_validate_json(reply.content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "its body"
            raise ServerError(
                f"what answers at {self.url} is no Placer service of this version:"
                f" {kind.__name__.removeprefix('_')} cannot be read, {where}: {first['msg']}",
                reply.status_code,
            ) from error


class _Health(BaseModel):
    status: str
    version: str

    def health(self) -> Health:
        return Health(self.status, self.version)


class _Progress(BaseModel):
    id: str
    status: str
    incumbent: float | None = None
    bound: float | None = None


class _Deadline:
    """When to give up waiting; never, without a time to wait."""

    def __init__(self, wait_s: float | None) -> None:
        self.wait_s = wait_s if wait_s is not None else float("inf")
        self._end = time.monotonic() + self.wait_s

    def left_s(self) -> float:
        return self._end - time.monotonic()


def _still_running(progress: _Progress, deadline: _Deadline) -> TimeoutExceeded:
    found = "nothing" if progress.incumbent is None else f"{progress.incumbent:g}, bound {progress.bound}"
    return TimeoutExceeded(
        f"placement {progress.id} is {progress.status} after {deadline.wait_s:g} s, found so far: {found}. It goes on:"
        f" ask for it later with placement({progress.id!r}), or take the best so far with stop({progress.id!r})"
    )


def _body(request: PlacementRequest) -> bytes:
    """The request without what is default, but with its versions, so that a reader of another version can tell."""
    content = request.model_dump(mode="json", exclude_defaults=True)
    content["schema_version"] = request.schema_version
    content["profile"]["schema_version"] = request.profile.schema_version
    return json.dumps(content).encode()


def _backoff_s(attempt: int) -> float:
    """Twice as long each time, and a random share of it, so that many clients do not come back at once."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**attempt) * random.uniform(0.5, 1.0)


def _retry_after_s(reply: httpx.Response) -> float:
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
