"""Operations of a service as exchanges: which requests an operation sends, in which order."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import httpx
from pydantic import BaseModel

from placer.errors import (
    InputError,
    PlacerError,
    ServerError,
    TimeoutExceeded,
    UnreachableError,
    kind_of,
)
from placer.schema import (
    BatchAnswers,
    Cluster,
    Comparison,
    Estimate,
    EstimateRequest,
    Evaluation,
    JointPlacement,
    JointRequest,
    LayerMap,
    Node,
    NodeList,
    Objective,
    Placement,
    PlacementPage,
    PlacementRequest,
    Profile,
    Progress,
    Status,
    Timeline,
)
from placer.schema.base import FormatName
from placer.schema.export import Export
from placer.schema.graph import ProfileRequest

from . import errors
from .bodies import (
    EncodedFields,
    batch_body,
    batches_of,
    body_of,
    encoded_fields,
    joint_fields,
    request_fields,
)
from .exchange import NOTHING_SENT, RETRIED, Call, Exchange, Pause, Sender

# Seconds that one request waits for an answer, less than the timeouts of common proxies.
MAX_POLL_S = 20.0

# Seconds that a measurement of the service's devices may take, as its default setting allows.
MEASUREMENT_S = 300.0

# Seconds that an estimate may take, which the service limits to 60.
ESTIMATE_S = 60.0

Map = Mapping[str, str]

Wire = TypeVar("Wire", bound=BaseModel)


class Health(BaseModel, frozen=True):
    """State of a service.

    Attributes:
        status: ``ok``.
        version: Its version of Placer.
    """

    status: str
    version: str


@dataclass
class Endpoints(Sender):
    """Operations of one service.

    Nearly every call is repeatable: a placement is requested by its content, so a repeated request
    has the same effect as a single one.
    """

    def place(self, request: PlacementRequest, wait: float | None = None) -> Exchange[Placement]:
        """Request a placement until it is there; the service stops the solve if the client leaves.

        The service cannot distinguish a client that was stopped from a broken connection. After a
        broken connection the question is therefore sent again, without the option to stop.
        Otherwise a proxy with a timeout shorter than the solve would stop it again and again.
        """
        deadline = _Deadline(wait)
        ask = partial(_polling_call, "POST", "/v1/placements", deadline, body_of(request))

        def follow(progress: Progress) -> Call:
            call = _polling_call("GET", placement_path(progress.id), deadline, accepted=True)
            return _stopping(call, ask(accepted=True))

        reply = yield from self.send(_stopping(ask(), ask()))
        return (yield from self._await_answer(Placement, reply, deadline, follow))

    def place_together(
        self, request: JointRequest, wait: float | None = None
    ) -> Exchange[JointPlacement]:
        """Request placements of several models until they are there; ``place`` explains the rest.

        The answer needs the models, so the request itself is repeated.
        """
        deadline = _Deadline(wait)
        body = json.dumps(joint_fields(request)).encode()
        ask = partial(_polling_call, "POST", "/v1/placements:together", deadline, body)

        def follow(_: Progress) -> Call:
            return _stopping(ask(accepted=True), ask(accepted=True))

        reply = yield from self.send(_stopping(ask(), ask()))
        return (yield from self._await_answer(JointPlacement, reply, deadline, follow))

    def submit(self, request: PlacementRequest) -> Exchange[Placement | Progress]:
        """Request a placement, and return at once."""
        reply = yield from self.send(Call("POST", "/v1/placements?wait=0", body_of(request)))
        return (
            self.read(Progress, reply) if reply.status_code == 202 else self.read(Placement, reply)
        )

    def place_many(
        self, requests: Sequence[PlacementRequest], wait: float | None = None
    ) -> Exchange[list[Placement | PlacerError]]:
        """Request placements in batches, and halve a batch that the service rejects.

        The service's limits are unknown here.
        """
        if isinstance(requests, PlacementRequest):
            raise InputError(
                "requests is one PlacementRequest; give a list, or call place(request)"
            )
        if not isinstance(requests, Iterable):
            raise InputError(
                f"requests is {kind_of(requests)}; give a list of placer.PlacementRequest"
            )
        deadline = _Deadline(wait)
        found: dict[int, Placement | PlacerError] = {}
        questions = [encoded_fields(request) for request in requests]
        batches = batches_of(questions)
        while batches:
            numbers = batches.pop(0)
            try:
                yield from self._batch(questions, numbers, found, deadline)
            except InputError as error:
                # The fault is in one of the questions, or the batch exceeds the service's limits.
                if len(numbers) == 1:
                    found[numbers[0]] = error
                else:
                    half = len(numbers) // 2
                    batches[:0] = numbers[:half], numbers[half:]
            except ServerError as error:
                if not found:
                    raise
                return [found.get(number, error) for number in range(len(questions))]
        return [found[number] for number in range(len(questions))]

    def _batch(
        self,
        questions: Sequence[EncodedFields],
        numbers: list[int],
        found: dict[int, Placement | PlacerError],
        deadline: _Deadline,
    ) -> Exchange[None]:
        """Send a batch, repeat questions that the queue rejected, and wait for running solves."""
        idle = 0
        while numbers:
            rejected = yield from self._batch_once(questions, numbers, found, deadline)
            # Attempts in succession in which the queue took no question.
            idle = 0 if len(rejected) < len(numbers) else idle + 1
            pause_s = max(rejected.values(), default=0.0)
            if idle > self.retries or pause_s > deadline.left_s():
                return
            numbers = list(rejected)
            if numbers:
                yield Pause(pause_s)

    def _batch_once(
        self,
        questions: Sequence[EncodedFields],
        numbers: list[int],
        found: dict[int, Placement | PlacerError],
        deadline: _Deadline,
    ) -> Exchange[dict[int, float]]:
        """Send a batch once, and return the pause in seconds of each question to repeat."""
        content = batch_body([questions[number] for number in numbers])
        reply = yield from self.send(
            _polling_call("POST", "/v1/placements:batch", deadline, content)
        )
        rejected: dict[int, float] = {}
        for number, answer in zip(numbers, self.read(BatchAnswers, reply).answers, strict=True):
            if answer.placement is not None:
                found[number] = answer.placement
            elif answer.status == 202 and answer.id is not None:
                found[number] = yield from self._placement_or_error(answer.id, deadline)
            else:
                found[number] = errors.from_problem(answer.status, answer.problem or {}, self.url)
                if answer.status in RETRIED:
                    rejected[number] = answer.retry_after_s or 0.0
        return rejected

    def _placement_or_error(
        self, key: str, deadline: _Deadline
    ) -> Exchange[Placement | PlacerError]:
        try:
            return (yield from self._poll_placement(key, deadline, accepted=True))
        except PlacerError as error:
            return error

    def placement(self, id: str, wait: float | None = None) -> Exchange[Placement]:
        """Request a placement that was requested before."""
        return (yield from self._poll_placement(id, _Deadline(wait), accepted=False))

    def stop(self, id: str) -> Exchange[Placement]:
        """End a solve with its best placement so far.

        After a lost answer the placement is looked up instead of stopped again: another client may
        have requested it in the meantime.
        """
        call = Call("DELETE", placement_path(id), wait_s=MAX_POLL_S, repeatable=False)
        for attempt in range(self.retries + 1):
            try:
                reply = yield from self.send(call)
            except (UnreachableError, TimeoutExceeded) as error:
                if attempt == self.retries or isinstance(error.__cause__, NOTHING_SENT):
                    raise
                reply = yield from self.send(
                    Call("GET", f"{placement_path(id)}?wait=2", wait_s=2.0)
                )
            if reply.status_code != 202:
                break
        return self.read(Placement, reply)

    def evaluate(
        self,
        layer_devices: Map | LayerMap | str,
        request: PlacementRequest | None = None,
        *,
        id: str | None = None,
        format: FormatName | None = None,
        best: bool = False,
    ) -> Exchange[Evaluation]:
        """Evaluate a map."""
        if (request is None) == (id is None):
            raise InputError(
                "give exactly one of request and id: the request that the map answers, or a"
                " placement of it"
            )
        content: dict[str, Any]
        if isinstance(layer_devices, str):
            content = {"text": layer_devices}
        elif isinstance(layer_devices, LayerMap):
            content = layer_devices.model_dump(mode="json")
        else:
            content = {"layer_devices": _layer_map(layer_devices)}
        if format is not None:
            content["format"] = format
        if request is not None:
            content["request"] = request_fields(request)
        parameters = [f"id={_quoted(id)}"] if id is not None else []
        parameters += ["best=true"] if best else []
        query = f"?{'&'.join(parameters)}" if parameters else ""
        return (yield from self._post(Evaluation, f"/v1/placements:evaluate{query}", content))

    def compare(
        self,
        maps: Mapping[str, Map | LayerMap] | None = None,
        ids: Sequence[str] = (),
        request: PlacementRequest | None = None,
    ) -> Exchange[Comparison]:
        """Compare maps."""
        maps = maps or {}
        if not isinstance(maps, Mapping):
            given = type(maps).__name__
            raise InputError(f"maps is a {given}; give maps by name, and placements as ids=[...]")
        replicas = {
            name: where.model_dump(mode="json")["replicas"]
            for name, where in maps.items()
            if isinstance(where, LayerMap) and where.replicas
        }
        devices = {
            name: where.layer_devices if isinstance(where, LayerMap) else where
            for name, where in maps.items()
        }
        content: dict[str, Any] = {
            "maps": {name: _layer_map(where) for name, where in devices.items()}
        }
        if replicas:
            content["replicas"] = replicas
        if request is not None:
            content["request"] = request_fields(request)
        query = "?" + "&".join(f"id={_quoted(one)}" for one in ids) if ids else ""
        return (yield from self._post(Comparison, f"/v1/placements:compare{query}", content))

    def page(
        self,
        query: str = "",
        *,
        status: Status | None = None,
        objective: Objective | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Exchange[PlacementPage]:
        """Request a page of past placements."""
        filters = {
            "q": query,
            "status": status,
            "objective": objective,
            "limit": limit,
            "cursor": cursor,
        }
        given = {name: value for name, value in filters.items() if value not in (None, "")}
        return (yield from self._get(PlacementPage, f"/v1/placements?{_query(given)}"))

    def request(self, id: str) -> Exchange[PlacementRequest]:
        """Request the question of a placement."""
        return (yield from self._get(PlacementRequest, f"{placement_path(id)}/request"))

    def timeline(self, id: str) -> Exchange[Timeline]:
        """Request the timeline of a placement."""
        return (yield from self._get(Timeline, f"{placement_path(id)}/timeline"))

    def trace(self, id: str) -> Exchange[str]:
        """Request the timeline of a placement as a trace."""
        return (yield from self.send(Call("GET", f"{placement_path(id)}/trace"))).text

    def report(self, id: str) -> Exchange[str]:
        """Request the report of a placement."""
        return (yield from self.send(Call("GET", f"{placement_path(id)}/report"))).text

    def export(self, id: str, format: FormatName) -> Exchange[Export]:
        """Request a placement in the format of another engine."""
        where = f"{placement_path(id)}/export?{urlencode({'format': format})}"
        return (yield from self._get(Export, where))

    def stored_profile(self, id: str) -> Exchange[Profile]:
        """Request a profile that the service has."""
        return (yield from self._get(Profile, f"/v1/profiles/{_quoted(id)}"))

    def cluster(
        self,
        nodes: Sequence[str] = (),
        *,
        network_bytes_per_s: float | None = None,
        network_latency_s: float = 0.0,
    ) -> Exchange[Cluster]:
        """Request the service's devices, which it measures once, or the devices of nodes."""
        if isinstance(nodes, str):
            raise InputError(f"nodes is {nodes!r}; give a list of names, [{nodes!r}]")
        network = {
            "network_bytes_per_s": network_bytes_per_s,
            "network_latency_s": network_latency_s or None,
        }
        parameters = [("node", _node_name(node)) for node in nodes]
        parameters += [(name, f"{value}") for name, value in network.items() if value is not None]
        query = f"?{_query(parameters)}" if parameters else ""
        reply = yield from self.send(Call("GET", f"/v1/cluster{query}", wait_s=MEASUREMENT_S))
        return self.read(Cluster, reply)

    def measure_cluster(self) -> Exchange[Cluster]:
        """Measure the service's devices again; each call occupies them for a while."""
        reply = yield from self.send(
            Call("POST", "/v1/cluster:measure", wait_s=MEASUREMENT_S, repeatable=False)
        )
        return self.read(Cluster, reply)

    def nodes(self) -> Exchange[tuple[Node, ...]]:
        """Request the registered nodes."""
        return (yield from self._get(NodeList, "/v1/nodes")).nodes

    def register_node(self, name: str, cluster: Cluster) -> Exchange[Node]:
        """Register or update a node."""
        if not isinstance(cluster, Cluster):
            raise InputError(
                f"cluster is {kind_of(cluster)}; give a Cluster, such as client.cluster() of that"
                " node"
            )
        reply = yield from self.send(
            Call("PUT", _node_path(name), cluster.model_dump_json().encode())
        )
        return self.read(Node, reply)

    def forget_node(self, name: str) -> Exchange[None]:
        """Delete a node; a repeated call would fail because the node is gone."""
        yield from self.send(Call("DELETE", _node_path(name), repeatable=False))

    def profile(self, request: ProfileRequest, wait: float | None = None) -> Exchange[Profile]:
        """Measure a graph, and request its profile until it is there."""
        if not isinstance(request, ProfileRequest):
            raise InputError(
                f"the request is {kind_of(request)}; give a ProfileRequest, as"
                " suggest(profile_on_server=True) makes, or call stored_profile(id) for a profile"
                " that the service has"
            )
        deadline = _Deadline(wait)
        content = request.model_dump_json(exclude_defaults=True).encode()

        def post() -> Call:
            return _polling_call("POST", "/v1/profiles", deadline, content)

        reply = yield from self.send(post())
        while reply.status_code == 202:
            progress = self.read(_Measuring, reply)
            if deadline.left_s() <= 0:
                raise TimeoutExceeded(
                    f"profile {progress.id} is {progress.status} after {deadline.wait_s:g} s; it"
                    " continues: ask again"
                )
            try:
                call = _polling_call("GET", f"/v1/profiles/{progress.id}", deadline, accepted=True)
                reply = yield from self.send(call)
            except ServerError as error:
                if error.status != 404:
                    raise
                # The service was killed in the meantime, and has lost the measurement.
                reply = yield from self.send(post())
        return self.read(Profile, reply)

    def estimate(self, request: EstimateRequest) -> Exchange[Estimate]:
        """Request the estimate of a graph's memory."""
        if not isinstance(request, EstimateRequest):
            raise InputError(
                f"the request is {kind_of(request)}; give a placer.schema.EstimateRequest with a"
                " captured graph"
            )
        content = request.model_dump_json(exclude_defaults=True).encode()
        reply = yield from self.send(Call("POST", "/v1/estimates", content, wait_s=ESTIMATE_S))
        return self.read(Estimate, reply)

    def health(self) -> Exchange[Health]:
        """Request the service's health."""
        return (yield from self._get(Health, "/healthz"))

    def _get(self, kind: type[Wire], path: str) -> Exchange[Wire]:
        reply = yield from self.send(Call("GET", path))
        return self.read(kind, reply)

    def _post(self, kind: type[Wire], path: str, content: dict[str, Any]) -> Exchange[Wire]:
        reply = yield from self.send(
            Call("POST", path, json.dumps(content).encode(), wait_s=MAX_POLL_S)
        )
        return self.read(kind, reply)

    def _poll_placement(
        self, key: str, deadline: _Deadline, *, accepted: bool
    ) -> Exchange[Placement]:
        """Request a placement by its id until it is there."""
        ask = partial(_polling_call, "GET", placement_path(key), deadline)
        reply = yield from self.send(ask(accepted=accepted))
        return (
            yield from self._await_answer(Placement, reply, deadline, lambda _: ask(accepted=True))
        )

    def _await_answer(
        self,
        kind: type[Wire],
        reply: httpx.Response,
        deadline: _Deadline,
        follow: Callable[[Progress], Call],
    ) -> Exchange[Wire]:
        """Send the call that ``follow`` returns for a 202, until the answer is there."""
        while reply.status_code == 202:
            progress = self.read(Progress, reply)
            if deadline.left_s() <= 0:
                raise _still_running(progress, deadline)
            reply = yield from self.send(follow(progress))
        return self.read(kind, reply)


class _Measuring(BaseModel):
    id: str
    status: str


class _Deadline:
    """Time at which to stop waiting; infinite without a limit."""

    def __init__(self, wait_s: float | None) -> None:
        if wait_s is not None and not (isinstance(wait_s, int | float) and wait_s == wait_s):
            raise InputError(f"wait is {wait_s!r:.80}; give a number of seconds, or None")
        self.wait_s = wait_s if wait_s is not None else float("inf")
        self.end_s = time.monotonic() + self.wait_s

    def left_s(self) -> float:
        return self.end_s - time.monotonic()


def placement_path(key: str) -> str:
    """Return the path of a placement.

    Raises:
        InputError: the id is not a text.
    """
    return f"/v1/placements/{_quoted(key)}"


def _quoted(key: str) -> str:
    if not isinstance(key, str):
        raise InputError(
            f"the id is {kind_of(key)}; give 32 hexadecimal digits, such as placement.id"
        )
    return _segment(key, "an id has 32 hexadecimal digits")


def _segment(text: str, form: str) -> str:
    """Return a text as one segment of a path.

    Raises:
        InputError: it is empty or a dot segment, which would lead to another path.
    """
    if text in ("", ".", ".."):
        raise InputError(f"{text!r} names nothing; {form}")
    return quote(text, safe="", errors="surrogatepass")


def _query(given: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> str:
    """Return a query; the service finds nothing for text that UTF-8 cannot express."""
    return urlencode(given, errors="surrogatepass")


def _node_path(name: str) -> str:
    return f"/v1/nodes/{_segment(_node_name(name), 'give the name of a node')}"


def _node_name(node: str) -> str:
    if not isinstance(node, str):
        raise InputError(f"a node is {kind_of(node)}; give its name, such as node.name")
    return node


def _layer_map(where: Map) -> dict[str, str]:
    if not isinstance(where, Mapping):
        raise InputError(
            f"a map is {kind_of(where)}; give a device for each layer, such as"
            " placement.layer_devices"
        )
    return dict(where)


def _polling_call(
    method: str,
    path: str,
    deadline: _Deadline,
    content: bytes | None = None,
    *,
    accepted: bool = False,
) -> Call:
    wait_s = max(0.0, min(MAX_POLL_S, deadline.left_s()))
    return Call(
        method, f"{path}?wait={wait_s:.3f}", content, wait_s, deadline.end_s, accepted=accepted
    )


def _stopping(call: Call, again: Call) -> Call:
    """Return the call with the option to stop the solve if this client leaves.

    Args:
        call: Call that waits for a solve.
        again: Call to send after a broken connection; see ``Endpoints.place``.
    """
    return replace(call, path=f"{call.path}&on_disconnect=stop", again=again)


def _still_running(progress: Progress, deadline: _Deadline) -> TimeoutExceeded:
    found = (
        "nothing"
        if progress.incumbent is None
        else f"{progress.incumbent:g}, bound {progress.bound}"
    )
    return TimeoutExceeded(
        f"placement {progress.id} is {progress.status} after {deadline.wait_s:g} s, found so far:"
        f" {found}. It continues: get it later with placement({progress.id!r}), or end it with the"
        f" best so far with stop({progress.id!r})"
    )
