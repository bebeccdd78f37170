"""Synchronous client of a Placer service."""

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

from .connection import RETRIES, TIMEOUT_S, BaseClient, require_open
from .endpoints import Health
from .event_stream import EventStream
from .exchange import Call, Exchange, Outcome, Pause

T = TypeVar("T")


class Client(BaseClient):
    """Client of one service; close it, or use it in a ``with`` statement.

    Requests that fail on the way are repeated if that is safe. It nearly always is: a placement is
    requested by its content, so a repeated request has the same effect as a single one. A closed
    client raises InputError.

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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(server, timeout, retries, key)
        self._http = httpx.Client(base_url=self.url, headers=self._headers, transport=transport)

    def place(self, request: PlacementRequest, wait: float | None = None) -> Placement:
        """Request a placement and wait for it; a repeated request is answered at once.

        Ctrl-C stops the solve on the service, unless other clients wait for it. Call ``submit`` for
        a solve that continues without this client.

        Args:
            request: The question.
            wait: Longest time to wait in seconds; unlimited if None.

        Returns:
            The placement, which may have the status ``infeasible`` or ``unknown``.

        Raises:
            InputError: The service finds a fault in the request.
            TimeoutExceeded: The placement is not ready in time. The solve continues: call
                ``placement(id)`` or ``stop(id)``.
            UnreachableError: The service cannot be reached.
            ServerError: The service cannot answer.
        """
        return self._carry_out(self._endpoints.place(request, wait))

    def place_together(self, request: JointRequest, wait: float | None = None) -> JointPlacement:
        """Request placements of several models that share the devices, and wait for them.

        The models are used one after another, as in a diffusion pipeline; see
        ``placer.suggest_together``. The rest is as for ``place``.

        Args:
            request: The models by name, with the runs of each.
            wait: Longest time to wait in seconds; unlimited if None.

        Returns:
            The placement of each model. ``joint.status`` may be ``infeasible`` or ``unknown``.

        Raises:
            InputError: The service finds a fault in the request.
            TimeoutExceeded: The placements are not ready in time. The solve continues: ask again,
                or call ``stop(id)``.
            UnreachableError: The service cannot be reached.
            ServerError: The service cannot answer.
        """
        return self._carry_out(self._endpoints.place_together(request, wait))

    def place_many(
        self, requests: Sequence[PlacementRequest], wait: float | None = None
    ) -> list[Placement | PlacerError]:
        """Request several placements together; common fields, such as the profile, are sent once.

        Args:
            requests: The questions.
            wait: Longest time to wait for all of them in seconds; unlimited if None.

        Returns:
            For each question its placement, or the error that ``place`` would raise for it.

        Raises:
            UnreachableError: The service cannot be reached. If some questions have been answered,
                this error is the result of the others instead.
            ServerError: The service cannot answer; likewise.
        """
        return self._carry_out(self._endpoints.place_many(requests, wait))

    def submit(self, request: PlacementRequest) -> Placement | Progress:
        """Request a placement without waiting.

        Args:
            request: The question.

        Returns:
            The placement if it is known, else the progress of its solve; see ``events`` and
                ``placement``.

        Raises:
            InputError: The service finds a fault in the request.
            ServerError: The service cannot be reached or cannot answer.
        """
        return self._carry_out(self._endpoints.submit(request))

    def events(self, id: str) -> Iterator[Progress | Placement]:
        """Yield the progress of a solve whenever it changes, and at the end the placement.

        An interrupted stream is resumed.

        Args:
            id: Id of the placement, from the result of ``submit`` or from
                ``request.content_hash()``.

        Raises:
            InputError: The solver found a fault in the request.
            ServerError: There is no such solve, it failed, or the service cannot be reached.
        """
        stream = EventStream(self._endpoints, id)
        while not stream.ended:
            require_open(self._http)
            outcome: Outcome
            try:
                with self._http.stream(**self._stream_arguments(stream.path)) as outcome:
                    if outcome.is_success:
                        for piece in outcome.iter_bytes():
                            yield from stream.read(piece)
                    else:
                        outcome.read()
            except httpx.RequestError as error:
                outcome = error
            if not stream.ended:
                time.sleep(stream.pause_s(outcome))

    def placement(self, id: str, wait: float | None = None) -> Placement:
        """Return a placement that was requested before.

        Args:
            id: Id of the placement.
            wait: Longest time to wait in seconds; unlimited if None.

        Raises:
            TimeoutExceeded: The placement is not ready in time; the solve continues.
            ServerError: There is no such placement, or the service cannot answer.
        """
        return self._carry_out(self._endpoints.placement(id, wait))

    def stop(self, id: str) -> Placement:
        """End a solve, and return the best placement so far.

        Its status is ``unknown`` if the solver had found none.
        """
        return self._carry_out(self._endpoints.stop(id))

    def evaluate(
        self,
        layer_devices: Mapping[str, str] | LayerMap | str,
        request: PlacementRequest | None = None,
        *,
        id: str | None = None,
        format: FormatName | None = None,
        best: bool = False,
    ) -> Evaluation:
        """Evaluate a map of your own by the cost model that the solver minimises.

        Args:
            layer_devices: Device of each layer, a ``LayerMap`` with replicas, or a text in
                ``format``.
            request: Request that the map answers.
            id: Instead of ``request``, a placement of the same request. The evaluation then also
                compares the map with that placement.
            format: Format of another engine, as for ``Placement.export``. The map is then compared
                with placements that this format can express.
            best: Whether the service also solves for the best placement, in a few seconds, and
                returns it with its speedup. For a longer solve, call ``place`` and give its ``id``.

        Raises:
            InputError: The request or the text has a fault, or neither or both of ``request`` and
                ``id`` are given.
            ServerError: There is no such placement, or the service cannot answer.
        """
        return self._carry_out(
            self._endpoints.evaluate(layer_devices, request, id=id, format=format, best=best)
        )

    def compare(
        self,
        maps: Mapping[str, Mapping[str, str] | LayerMap] | None = None,
        ids: Sequence[str] = (),
        request: PlacementRequest | None = None,
    ) -> Comparison:
        """Compare maps and placements, all evaluated for one request.

        Args:
            maps: Device of each layer, or a ``LayerMap`` with replicas, by the name of the map.
            ids: Ids of placements.
            request: Request for the evaluation; the first placement's request if None.

        Raises:
            InputError: Fewer than two are given, or the request is missing or has a fault.
            ServerError: There is no such placement, or the service cannot answer.
        """
        return self._carry_out(self._endpoints.compare(maps, ids, request))

    def page(
        self,
        query: str = "",
        *,
        status: Status | None = None,
        objective: Objective | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> PlacementPage:
        """Return a page of past placements, newest first.

        Args:
            query: Text that the model's name or the id must contain.
            status: Required status, if given.
            objective: Required objective, if given.
            limit: Largest number of placements, up to 200.
            cursor: Start of the page: ``next`` of the page before.
        """
        return self._carry_out(
            self._endpoints.page(
                query, status=status, objective=objective, limit=limit, cursor=cursor
            )
        )

    def history(
        self, query: str = "", *, status: Status | None = None, objective: Objective | None = None
    ) -> Iterator[Summary]:
        """Yield all past placements, newest first, loaded page by page; see ``page``."""
        cursor: str | None = None
        while True:
            found = self.page(query, status=status, objective=objective, limit=200, cursor=cursor)
            yield from found.placements
            if (cursor := found.next) is None:
                return

    def request(self, id: str) -> PlacementRequest:
        """Return the request of a placement, ready to be sent again."""
        return self._carry_out(self._endpoints.request(id))

    def timeline(self, id: str) -> Timeline:
        """Return when each device works on which micro-batch, in milliseconds.

        The times are predictions from the placement's schedule and the profile.
        """
        return self._carry_out(self._endpoints.timeline(id))

    def trace(self, id: str) -> str:
        """Return the timeline as JSON for https://ui.perfetto.dev."""
        return self._carry_out(self._endpoints.trace(id))

    def report(self, id: str) -> str:
        """Return a report of a placement as one HTML file."""
        return self._carry_out(self._endpoints.report(id))

    def export(self, id: str, format: FormatName) -> Export:
        """Return a placement in the format of another engine; see ``Placement.export``.

        Args:
            id: Id of the placement.
            format: Name of the format, such as ``"vllm"``.

        Raises:
            InputError: There is no such format, or it cannot express the placement.
            ServerError: There is no such placement, or the service cannot answer.
        """
        return self._carry_out(self._endpoints.export(id, format))

    def profile(self, request: ProfileRequest, wait: float | None = None) -> Profile:
        """Measure the layers of a captured graph on the devices of the service's machine.

        Args:
            request: The graph: operations, shapes and dtypes, but no weights; see
                ``placer.profiler.remote.sending.describe``.
            wait: Longest time to wait in seconds; unlimited if None.

        Raises:
            InputError: The service finds a fault in the graph, or one of its layers fails there.
            TimeoutExceeded: The profile is not ready in time; the measurement continues.
            UnreachableError: The service cannot be reached.
            ServerError: The service cannot answer, for example since it has no torch.
        """
        return self._carry_out(self._endpoints.profile(request, wait))

    def estimate(self, request: EstimateRequest) -> Estimate:
        """Estimate the memory of a captured graph by device, and whether it fits.

        Args:
            request: The graph, without weights, and the devices; see
                ``placer.profiler.remote.sending.describe``.

        Raises:
            InputError: The service finds a fault in the graph or the devices.
            UnreachableError: The service cannot be reached.
            ServerError: The service cannot answer, for example since it has no torch.
        """
        return self._carry_out(self._endpoints.estimate(request))

    def stored_profile(self, id: str) -> Profile:
        """Return a profile that the service has; summaries of placements show its id."""
        return self._carry_out(self._endpoints.stored_profile(id))

    def cluster(
        self,
        nodes: Sequence[str] = (),
        *,
        network_bytes_per_s: float | None = None,
        network_latency_s: float = 0.0,
    ) -> Cluster:
        """Return the devices and links of the service's machine, or of registered nodes.

        Args:
            nodes: Names of nodes whose devices to join as ``NODE/cuda:0``; the service's own
                devices if empty.
            network_bytes_per_s: Bandwidth between two nodes' memories; required for several nodes.
            network_latency_s: Latency of a transfer between nodes in seconds.

        Raises:
            InputError: Several nodes are given without a bandwidth, or they have too many devices.
            ServerError: There is no such node, or the service cannot answer.
        """
        return self._carry_out(
            self._endpoints.cluster(
                nodes, network_bytes_per_s=network_bytes_per_s, network_latency_s=network_latency_s
            )
        )

    def measure_cluster(self) -> Cluster:
        """Measure the devices of the service's machine again.

        A lost answer is not requested twice; ``cluster`` returns it later.
        """
        return self._carry_out(self._endpoints.measure_cluster())

    def nodes(self) -> tuple[Node, ...]:
        """Return the registered nodes by name."""
        return self._carry_out(self._endpoints.nodes())

    def register_node(self, name: str, cluster: Cluster) -> Node:
        """Register a node with its devices, so that placements can span hosts, or update it.

        Args:
            name: Name of the node.
            cluster: Its devices, as ``client.cluster()`` of the service on that node returns them.

        Raises:
            InputError: These are not devices of one node, or too many.
            ServerError: The name is invalid for a node, or the service cannot answer.
        """
        return self._carry_out(self._endpoints.register_node(name, cluster))

    def forget_node(self, name: str) -> None:
        """Delete a node.

        A lost answer is not requested twice; ``nodes`` shows whether the node is still there.
        """
        self._carry_out(self._endpoints.forget_node(name))

    def health(self) -> Health:
        """Return whether the service is alive, and its version of Placer."""
        return self._carry_out(self._endpoints.health())

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
        require_open(self._http)
        try:
            return self._http.request(**self._arguments(step))
        except httpx.RequestError as error:
            return error
