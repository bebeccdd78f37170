"""Speaks to a Placer service: ``Client``, and ``AsyncClient`` for asyncio. Both carry out the same exchanges."""

from __future__ import annotations

import asyncio
import os
import time
from types import TracebackType
from typing import Self, TypeVar

import httpx

from placer.errors import InputError
from placer.schema import Cluster, Placement, PlacementRequest, Profile
from placer.schema.graph import ProfileRequest

from .exchange import Call, Dialogue, Exchange, Health, Outcome, Pause

__all__ = ["AsyncClient", "Client"]

T = TypeVar("T")

TIMEOUT_S = 10.0
RETRIES = 4

HEADERS = {"Content-Type": "application/json", "Accept": "application/json, application/problem+json"}


class Client:
    """A client of one service; close it, or use it in a ``with`` statement.

    Args:
        server: the service's URL, ``http://host:8080``; ``PLACER_URL`` from the environment if None.
        timeout: how long connecting, sending or an answer that is due may take, in seconds.
        retries: how often a call is repeated that failed on the way, or that the service was too busy for.
        key: the bearer key, where the service wants one; ``PLACER_KEY`` from the environment if None.
        transport: carries the HTTP requests, for tests; the network if None.

    Raises:
        InputError: no server is given, it is no URL, or the key cannot be sent.
    """

    def __init__(
        self,
        server: str | None = None,
        timeout: float = TIMEOUT_S,
        retries: int = RETRIES,
        *,
        key: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = _url(server)
        self._dialogue = Dialogue(self.url, retries)
        self._timeout_s = timeout
        self._http = httpx.Client(base_url=self.url, headers=_headers(key), transport=transport)

    def place(self, request: PlacementRequest, wait: float | None = None) -> Placement:
        """Ask for a placement and wait for it. The same request asked again is answered at once.

        Args:
            request: the question.
            wait: how long to wait, in seconds; until it is there if None.

        Returns:
            The placement; also one whose status is ``infeasible`` or ``unknown``.

        Raises:
            InputError: the service finds a fault in the request.
            TimeoutExceeded: it is not there in time; it goes on, and ``placement(id)`` or ``stop(id)`` gets it.
            UnreachableError: the service cannot be reached.
            ServerError: it cannot answer.
        """
        return self._carry_out(self._dialogue.place(request, wait))

    def placement(self, id: str, wait: float | None = None) -> Placement:
        """A placement that was asked for before; see ``place``."""
        return self._carry_out(self._dialogue.placement(id, wait))

    def stop(self, id: str) -> Placement:
        """End a solve and take the best placement so far, whose status is ``unknown`` if there is none."""
        return self._carry_out(self._dialogue.stop(id))

    def profile(self, request: ProfileRequest, wait: float | None = None) -> Profile:
        """Have the layers of a captured graph measured on the devices of the service's machine, and wait for it.

        Args:
            request: the graph: operations, shapes and dtypes, no weights; see ``placer.profiler.sending.describe``.
            wait: how long to wait, in seconds; until it is there if None.

        Raises:
            InputError: the service finds a fault in the graph, or a layer of it fails there.
            TimeoutExceeded: it is not there in time; it goes on.
            UnreachableError: the service cannot be reached.
            ServerError: it cannot answer: torch is not installed there, say.
        """
        return self._carry_out(self._dialogue.profile(request, wait))

    def cluster(self) -> Cluster:
        """The devices of the service's machine and the links between them."""
        return self._carry_out(self._dialogue.cluster())

    def health(self) -> Health:
        """Whether the service lives, and the version of its Placer."""
        return self._carry_out(self._dialogue.health())

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _carry_out(self, exchange: Exchange[T]) -> T:
        outcome: Outcome | None = None
        while True:
            try:
                step = exchange.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            outcome = self._perform(step)

    def _perform(self, step: Call | Pause) -> Outcome | None:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        try:
            return self._http.request(
                step.method, step.path, content=step.content, timeout=_timeout(step, self._timeout_s)
            )
        except httpx.RequestError as error:
            return error


class AsyncClient:
    """``Client`` for asyncio; close it with ``aclose``, or use it in an ``async with`` statement.

    Args:
        server: the service's URL, ``http://host:8080``; ``PLACER_URL`` from the environment if None.
        timeout: how long connecting, sending or an answer that is due may take, in seconds.
        retries: how often a call is repeated that failed on the way, or that the service was too busy for.
        key: the bearer key, where the service wants one; ``PLACER_KEY`` from the environment if None.
        transport: carries the HTTP requests, for tests; the network if None.

    Raises:
        InputError: no server is given, it is no URL, or the key cannot be sent.
    """

    def __init__(
        self,
        server: str | None = None,
        timeout: float = TIMEOUT_S,
        retries: int = RETRIES,
        *,
        key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = _url(server)
        self._dialogue = Dialogue(self.url, retries)
        self._timeout_s = timeout
        self._http = httpx.AsyncClient(base_url=self.url, headers=_headers(key), transport=transport)

    async def place(self, request: PlacementRequest, wait: float | None = None) -> Placement:
        """See ``Client.place``."""
        return await self._carry_out(self._dialogue.place(request, wait))

    async def placement(self, id: str, wait: float | None = None) -> Placement:
        """See ``Client.placement``."""
        return await self._carry_out(self._dialogue.placement(id, wait))

    async def stop(self, id: str) -> Placement:
        """See ``Client.stop``."""
        return await self._carry_out(self._dialogue.stop(id))

    async def profile(self, request: ProfileRequest, wait: float | None = None) -> Profile:
        """See ``Client.profile``."""
        return await self._carry_out(self._dialogue.profile(request, wait))

    async def cluster(self) -> Cluster:
        """See ``Client.cluster``."""
        return await self._carry_out(self._dialogue.cluster())

    async def health(self) -> Health:
        """See ``Client.health``."""
        return await self._carry_out(self._dialogue.health())

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _carry_out(self, exchange: Exchange[T]) -> T:
        outcome: Outcome | None = None
        while True:
            try:
                step = exchange.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            outcome = await self._perform(step)

    async def _perform(self, step: Call | Pause) -> Outcome | None:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        try:
            return await self._http.request(
                step.method, step.path, content=step.content, timeout=_timeout(step, self._timeout_s)
            )
        except httpx.RequestError as error:
            return error


def _headers(key: str | None) -> dict[str, str]:
    given = os.environ.get("PLACER_KEY", "") if key is None else key
    if not given:
        return HEADERS
    if not given.isascii() or not given.isprintable():
        raise InputError("the key has characters that cannot be sent; give what was shown when it was made")
    return {**HEADERS, "Authorization": f"Bearer {given}"}


def _url(server: str | None) -> str:
    given = server or os.environ.get("PLACER_URL", "")
    if not given:
        raise InputError("no server is given: pass server='http://host:8080', or set PLACER_URL")
    try:
        url = httpx.URL(given)
    except httpx.InvalidURL as error:
        raise InputError(f"server {given!r} is no URL: {error}; an example is 'http://host:8080'") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise InputError(f"server {given!r} is no URL of a service; an example is 'http://host:8080'")
    return given.rstrip("/")


def _timeout(call: Call, timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, read=timeout_s + call.wait_s)
