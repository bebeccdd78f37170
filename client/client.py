"""Speaks to a Placer service and waits for it; ``AsyncClient`` is the same for asyncio."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

import httpx

from placer.errors import PlacerError
from placer.schema import (
    Cluster,
    Comparison,
    Evaluation,
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
from placer.schema.graph import ProfileRequest

from .connection import RETRIES, TIMEOUT_S, headers_of, refuse_closed, timeout_of, url_of
from .dialogue import Dialogue, Health
from .exchange import Call, Exchange, Outcome, Pause
from .following import SILENCE_S, Following

__all__ = ["Client"]

T = TypeVar("T")


class Client:
    """A client of one service; close it, or use it in a ``with`` statement.

    What fails on the way is tried again where that is safe: nearly everywhere, for a placement is
    asked for by its content, so that asking twice is asking once. A client that was closed raises
    InputErrors.

    Args:
        server: the service's URL, ``http://host:8080``; ``PLACER_URL`` from the environment if
            None.
        timeout: how long connecting, sending or an answer that is due may take, in seconds.
        retries: how often a call is repeated that failed on the way, or that the service was too
            busy for.
        key: the bearer key, where the service wants one; ``PLACER_KEY`` from the environment if
            None.
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
        self.url = url_of(server)
        self._dialogue = Dialogue(self.url, retries)
        self._timeout_s = timeout
        self._http = httpx.Client(base_url=self.url, headers=headers_of(key), transport=transport)

    def place(self, request: PlacementRequest, wait: float | None = None) -> Placement:
        """Ask for a placement and wait for it. The same request asked again is answered at once.

        Ctrl-C meanwhile stops the solve on the service, unless others wait for it too. Call
        ``submit`` for a solve that goes on without you.

        Args:
            request: the question.
            wait: how long to wait, in seconds; until it is there if None.

        Returns:
            The placement; also one whose status is ``infeasible`` or ``unknown``.

        Raises:
            InputError: the service finds a fault in the request.
            TimeoutExceeded: it is not there in time; it goes on, and ``placement(id)`` or
                ``stop(id)`` gets it.
            UnreachableError: the service cannot be reached.
            ServerError: it cannot answer.
        """
        return self._carry_out(self._dialogue.place(request, wait))

    def place_many(
        self, requests: Sequence[PlacementRequest], wait: float | None = None
    ) -> list[Placement | PlacerError]:
        """Ask for several placements together; what they have in common, their profile say, is sent
        once.

        Args:
            requests: the questions.
            wait: how long to wait for all, in seconds; until they are there if None.

        Returns:
            For each question its placement, or the error that ``place`` would have raised for it.

        Raises:
            UnreachableError: the service cannot be reached; if that comes after some answers, it is
                the others' error.
            ServerError: it cannot answer; likewise.
        """
        return self._carry_out(self._dialogue.place_many(requests, wait))

    def submit(self, request: PlacementRequest) -> Placement | Progress:
        """Ask for a placement without waiting: it, or how far it is. See ``events`` and
        ``placement``.
        """
        return self._carry_out(self._dialogue.submit(request))

    def events(self, id: str) -> Iterator[Progress | Placement]:
        """How a solve goes, as it goes: its progress whenever that changes, and the placement at
        the end.

        A stream that breaks off is taken up again.

        Args:
            id: of the placement: of what ``submit`` returned, or ``request.content_hash()``.

        Raises:
            InputError: the solver found a fault in the request.
            ServerError: there is no such solve, it failed, or the service cannot be reached.
        """
        following = Following(self._dialogue, id)
        while not following.ended:
            refuse_closed(self._http)
            try:
                with self._http.stream(
                    "GET", following.path, timeout=self._stream_timeout()
                ) as reply:
                    if not reply.is_success:
                        reply.read()
                        time.sleep(following.refused(reply))
                        continue
                    for piece in reply.iter_bytes():
                        yield from following.read(piece)
                if not following.ended:
                    time.sleep(following.lost(None))
            except httpx.RequestError as error:
                time.sleep(following.lost(error))

    def placement(self, id: str, wait: float | None = None) -> Placement:
        """A placement that was asked for before; see ``place``."""
        return self._carry_out(self._dialogue.placement(id, wait))

    def stop(self, id: str) -> Placement:
        """End a solve and take the best placement so far, whose status is ``unknown`` if there is
        none.
        """
        return self._carry_out(self._dialogue.stop(id))

    def evaluate(
        self,
        layer_devices: Mapping[str, str],
        request: PlacementRequest | None = None,
        *,
        id: str | None = None,
    ) -> Evaluation:
        """Have a map of your own judged by the cost model that the solver minimises.

        Args:
            layer_devices: layer -> device.
            request: the question that it answers.
            id: instead, a placement whose question it answers; then the map is held against that
                one, too.

        Raises:
            InputError: the request has a fault, or neither or both of request and id are given.
            ServerError: there is no such placement, or the service cannot answer.
        """
        return self._carry_out(self._dialogue.evaluate(layer_devices, request, id))

    def compare(
        self,
        maps: Mapping[str, Mapping[str, str]] | None = None,
        ids: Sequence[str] = (),
        request: PlacementRequest | None = None,
    ) -> Comparison:
        """Have maps and placements held against each other, all judged by one question.

        Args:
            maps: name -> layer -> device.
            ids: of placements.
            request: the question; that of the first placement if None.

        Raises:
            InputError: there are fewer than two, no question, or one with a fault.
            ServerError: there is no such placement, or the service cannot answer.
        """
        return self._carry_out(self._dialogue.compare(maps or {}, ids, request))

    def page(
        self,
        query: str = "",
        *,
        status: Status | None = None,
        objective: Objective | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> PlacementPage:
        """Some past placements, newest first.

        Args:
            query: what the model's name or the id must contain.
            status: only those.
            objective: only those.
            limit: how many at most, up to 200.
            cursor: where to go on: ``next`` of the page before.
        """
        filters = {
            "q": query,
            "status": status,
            "objective": objective,
            "limit": limit,
            "cursor": cursor,
        }
        return self._carry_out(self._dialogue.page(filters))

    def history(
        self, query: str = "", *, status: Status | None = None, objective: Objective | None = None
    ) -> Iterator[Summary]:
        """All past placements, newest first, fetched as they are looked at; see ``page``."""
        cursor: str | None = None
        while True:
            found = self.page(query, status=status, objective=objective, limit=200, cursor=cursor)
            yield from found.placements
            if (cursor := found.next) is None:
                return

    def request(self, id: str) -> PlacementRequest:
        """The question of a placement, as it can be asked again."""
        return self._carry_out(self._dialogue.request(id))

    def timeline(self, id: str) -> Timeline:
        """When each device works on which micro-batch under a placement, as the schedule and the
        profile predict it.
        """
        return self._carry_out(self._dialogue.timeline(id))

    def trace(self, id: str) -> str:
        """The same as JSON for https://ui.perfetto.dev."""
        return self._carry_out(self._dialogue.text(id, "trace"))

    def report(self, id: str) -> str:
        """A placement for people: one HTML file."""
        return self._carry_out(self._dialogue.text(id, "report"))

    def profile(self, request: ProfileRequest, wait: float | None = None) -> Profile:
        """Have the layers of a captured graph measured on the devices of the service's machine, and
        wait for it.

        Args:
            request: the graph: operations, shapes and dtypes, no weights; see
                ``placer.profiler.remote.sending.describe``.
            wait: how long to wait, in seconds; until it is there if None.

        Raises:
            InputError: the service finds a fault in the graph, or a layer of it fails there.
            TimeoutExceeded: it is not there in time; it goes on.
            UnreachableError: the service cannot be reached.
            ServerError: it cannot answer: torch is not installed there, say.
        """
        return self._carry_out(self._dialogue.profile(request, wait))

    def stored_profile(self, id: str) -> Profile:
        """A profile that placements were asked for, or that was measured there; summaries have its
        id.
        """
        return self._carry_out(self._dialogue.stored_profile(id))

    def cluster(
        self,
        nodes: Sequence[str] = (),
        *,
        network_bytes_per_s: float | None = None,
        network_latency_s: float = 0.0,
    ) -> Cluster:
        """The devices of the service's machine, or of nodes that registered, and the links between
        them.

        Args:
            nodes: the names of those whose devices are joined, ``NODE/cuda:0``; the service's own
                if there are none.
            network_bytes_per_s: from one node's memory to another's; needed where there are
                several.
            network_latency_s: of a transfer between nodes.

        Raises:
            InputError: there are several nodes and no network, or they have too many devices.
            ServerError: there is no such node, or the service cannot answer.
        """
        return self._carry_out(
            self._dialogue.cluster(nodes, network_bytes_per_s, network_latency_s)
        )

    def measure_cluster(self) -> Cluster:
        """Have the devices of the service's machine measured anew.

        Where the answer is lost this is not asked twice: ``cluster`` has it later.
        """
        return self._carry_out(self._dialogue.measure_cluster())

    def nodes(self) -> tuple[Node, ...]:
        """The nodes that registered, by name."""
        return self._carry_out(self._dialogue.nodes())

    def register_node(self, name: str, cluster: Cluster) -> Node:
        """Register a node with its devices, so that placements can span hosts; again is an update.

        Args:
            name: of the node.
            cluster: its devices, as the service there tells them: ``client.cluster()``.

        Raises:
            InputError: these are no devices of one node, or too many.
            ServerError: the name is none that a node can have, or the service cannot answer.
        """
        return self._carry_out(self._dialogue.register_node(name, cluster))

    def forget_node(self, name: str) -> None:
        """Forget a node. Where the answer is lost this is not asked twice: ``nodes`` tells whether
        it is there.
        """
        self._carry_out(self._dialogue.forget_node(name))

    def health(self) -> Health:
        """Whether the service lives, and the version of its Placer."""
        return self._carry_out(self._dialogue.health())

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
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
        refuse_closed(self._http)
        try:
            return self._http.request(
                step.method,
                step.path,
                content=step.content,
                timeout=timeout_of(step, self._timeout_s),
            )
        except httpx.RequestError as error:
            return error

    def _stream_timeout(self) -> httpx.Timeout:
        return httpx.Timeout(self._timeout_s, read=max(self._timeout_s, SILENCE_S))
