"""Client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

import httpx

from placer.errors import PlacerError
from placer.schema import (
    Cluster,
    Comparison,
    Estimate,
    EstimateRequest,
    Evaluation,
    JointPlacement,
    JointRequest,
    LayerMap,
    Node,
    Objective,
    Placement,
    PlacementPage,
    PlacementRequest,
    Profile,
    Progress,
    Status,
    Summary,
    Timeline,
)
from placer.schema.base import FormatName
from placer.schema.export import Export
from placer.schema.graph import ProfileRequest

from .base import BaseClient
from .connection import RETRIES, TIMEOUT_S, require_open
from .endpoints import Health
from .event_stream import EventStream
from .exchange import Call, Exchange, Outcome, Pause

__all__ = ["AsyncClient"]

T = TypeVar("T")


class AsyncClient(BaseClient):
    """Client of one service for asyncio, with the methods of ``Client``.

    Close it with ``aclose``, or use it in an ``async with`` statement.

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

    async def place(self, request: PlacementRequest, wait: float | None = None) -> Placement:
        """See ``Client.place``; cancelling the task stops the solve, as Ctrl-C does there."""
        return await self._carry_out(self._endpoints.place(request, wait))

    async def place_together(
        self, request: JointRequest, wait: float | None = None
    ) -> JointPlacement:
        """See ``Client.place_together``."""
        return await self._carry_out(self._endpoints.place_together(request, wait))

    async def place_many(
        self, requests: Sequence[PlacementRequest], wait: float | None = None
    ) -> list[Placement | PlacerError]:
        """See ``Client.place_many``."""
        return await self._carry_out(self._endpoints.place_many(requests, wait))

    async def submit(self, request: PlacementRequest) -> Placement | Progress:
        """See ``Client.submit``."""
        return await self._carry_out(self._endpoints.submit(request))

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

    async def placement(self, id: str, wait: float | None = None) -> Placement:
        """See ``Client.placement``."""
        return await self._carry_out(self._endpoints.placement(id, wait))

    async def stop(self, id: str) -> Placement:
        """See ``Client.stop``."""
        return await self._carry_out(self._endpoints.stop(id))

    async def evaluate(
        self,
        layer_devices: Mapping[str, str] | LayerMap | str,
        request: PlacementRequest | None = None,
        *,
        id: str | None = None,
        format: FormatName | None = None,
        best: bool = False,
    ) -> Evaluation:
        """See ``Client.evaluate``."""
        exchange = self._endpoints.evaluate(layer_devices, request, id, format, best)
        return await self._carry_out(exchange)

    async def compare(
        self,
        maps: Mapping[str, Mapping[str, str] | LayerMap] | None = None,
        ids: Sequence[str] = (),
        request: PlacementRequest | None = None,
    ) -> Comparison:
        """See ``Client.compare``."""
        return await self._carry_out(self._endpoints.compare(maps or {}, ids, request))

    async def page(
        self,
        query: str = "",
        *,
        status: Status | None = None,
        objective: Objective | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> PlacementPage:
        """See ``Client.page``."""
        return await self._carry_out(self._endpoints.page(query, status, objective, limit, cursor))

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

    async def request(self, id: str) -> PlacementRequest:
        """See ``Client.request``."""
        return await self._carry_out(self._endpoints.request(id))

    async def timeline(self, id: str) -> Timeline:
        """See ``Client.timeline``."""
        return await self._carry_out(self._endpoints.timeline(id))

    async def trace(self, id: str) -> str:
        """See ``Client.trace``."""
        return await self._carry_out(self._endpoints.text(id, "trace"))

    async def report(self, id: str) -> str:
        """See ``Client.report``."""
        return await self._carry_out(self._endpoints.text(id, "report"))

    async def export(self, id: str, format: FormatName) -> Export:
        """See ``Client.export``."""
        return await self._carry_out(self._endpoints.export(id, format))

    async def profile(self, request: ProfileRequest, wait: float | None = None) -> Profile:
        """See ``Client.profile``."""
        return await self._carry_out(self._endpoints.profile(request, wait))

    async def estimate(self, request: EstimateRequest) -> Estimate:
        """See ``Client.estimate``."""
        return await self._carry_out(self._endpoints.estimate(request))

    async def stored_profile(self, id: str) -> Profile:
        """See ``Client.stored_profile``."""
        return await self._carry_out(self._endpoints.stored_profile(id))

    async def cluster(
        self,
        nodes: Sequence[str] = (),
        *,
        network_bytes_per_s: float | None = None,
        network_latency_s: float = 0.0,
    ) -> Cluster:
        """See ``Client.cluster``."""
        return await self._carry_out(
            self._endpoints.cluster(nodes, network_bytes_per_s, network_latency_s)
        )

    async def measure_cluster(self) -> Cluster:
        """See ``Client.measure_cluster``."""
        return await self._carry_out(self._endpoints.measure_cluster())

    async def nodes(self) -> tuple[Node, ...]:
        """See ``Client.nodes``."""
        return await self._carry_out(self._endpoints.nodes())

    async def register_node(self, name: str, cluster: Cluster) -> Node:
        """See ``Client.register_node``."""
        return await self._carry_out(self._endpoints.register_node(name, cluster))

    async def forget_node(self, name: str) -> None:
        """See ``Client.forget_node``."""
        await self._carry_out(self._endpoints.forget_node(name))

    async def health(self) -> Health:
        """See ``Client.health``."""
        return await self._carry_out(self._endpoints.health())

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
