"""Client for asyncio."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from placer.schema import Objective, Placement, Progress, Status, Summary

from .connection import RETRIES, TIMEOUT_S, BaseClient, require_open
from .endpoints import Endpoints
from .event_stream import EventStream
from .exchange import Call, Exchange, Outcome, Pause

T = TypeVar("T")
P = ParamSpec("P")


def _awaited(
    endpoint: Callable[Concatenate[Endpoints, P], Exchange[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Return the method of ``AsyncClient`` that carries out the exchange of an endpoint."""

    @functools.wraps(endpoint)
    async def method(client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await client._carry_out(endpoint(client._endpoints, *args, **kwargs))

    return method


class AsyncClient(BaseClient):
    """Client of one service for asyncio: the methods of ``Client``, each with ``await``.

    Close it with ``aclose``, or use it in an ``async with`` statement. ``events`` and ``history``
    are asynchronous iterators. Cancelling the task of ``place`` stops the solve, as Ctrl-C does for
    ``Client``.

    Args:
        server: The service's URL, such as ``http://host:8080``; ``PLACER_URL`` from the environment
            if None.
        timeout: Seconds that connecting, sending or receiving may take.
        retries: Number of repetitions of a request that failed on the way, or for which the service
            was too busy.
        key: Bearer key, if the service requires one; ``PLACER_KEY`` from the environment if None.
        transport: Transport of the HTTP requests, for tests; the network if None.

    Raises:
        InputError: No server is given, its URL is invalid, or the key cannot be sent.
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
        super().__init__(server, timeout, retries, key)
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=self._headers, transport=transport
        )

    place = _awaited(Endpoints.place)
    place_together = _awaited(Endpoints.place_together)
    place_many = _awaited(Endpoints.place_many)
    submit = _awaited(Endpoints.submit)
    placement = _awaited(Endpoints.placement)
    stop = _awaited(Endpoints.stop)
    evaluate = _awaited(Endpoints.evaluate)
    compare = _awaited(Endpoints.compare)
    page = _awaited(Endpoints.page)
    request = _awaited(Endpoints.request)
    timeline = _awaited(Endpoints.timeline)
    trace = _awaited(Endpoints.trace)
    report = _awaited(Endpoints.report)
    export = _awaited(Endpoints.export)
    profile = _awaited(Endpoints.profile)
    estimate = _awaited(Endpoints.estimate)
    stored_profile = _awaited(Endpoints.stored_profile)
    cluster = _awaited(Endpoints.cluster)
    measure_cluster = _awaited(Endpoints.measure_cluster)
    nodes = _awaited(Endpoints.nodes)
    register_node = _awaited(Endpoints.register_node)
    forget_node = _awaited(Endpoints.forget_node)
    health = _awaited(Endpoints.health)

    async def events(self, id: str) -> AsyncIterator[Progress | Placement]:
        """See ``Client.events``."""
        stream = EventStream(self._endpoints, id)
        while not stream.ended:
            require_open(self._http)
            outcome: Outcome
            try:
                async with self._http.stream(**self._stream_arguments(stream.path)) as outcome:
                    if outcome.is_success:
                        async for piece in outcome.aiter_bytes():
                            for event in stream.read(piece):
                                yield event
                    else:
                        await outcome.aread()
            except httpx.RequestError as error:
                outcome = error
            if not stream.ended:
                await asyncio.sleep(stream.pause_s(outcome))

    async def history(
        self, query: str = "", *, status: Status | None = None, objective: Objective | None = None
    ) -> AsyncIterator[Summary]:
        """See ``Client.history``."""
        cursor: str | None = None
        while True:
            found = await self.page(
                query, status=status, objective=objective, limit=200, cursor=cursor
            )
            for summary in found.placements:
                yield summary
            if (cursor := found.next) is None:
                return

    async def aclose(self) -> None:
        """See ``Client.close``."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
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
        require_open(self._http)
        try:
            return await self._http.request(**self._arguments(step))
        except httpx.RequestError as error:
            return error
