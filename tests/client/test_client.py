from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
from typing import Any

import httpx
import pytest

from placer.errors import InputError, ServerError, TimeoutExceeded, UnreachableError
from placer.schema import (
    Batch,
    Cluster,
    DeviceEstimate,
    Estimate,
    EstimateRequest,
    JointRequest,
    LayerMap,
    MemoryUse,
    Node,
    Placement,
    PlacementRequest,
    Replica,
)
from placer_client import AsyncClient, Client, exchange
from placer_client.event_stream import EventStream
from placer_server.openapi import examples

URL = "http://service.test"
KEY = "0" * 32
DONE = {"status": "optimal", "objective": "throughput", "objective_value": 1.0, "id": KEY}
RUNNING = {"id": KEY, "status": "running", "incumbent": 7.0, "bound": 3.0, "elapsed_s": 1.0}


@pytest.fixture
def request_():
    return PlacementRequest.model_validate(
        {
            "profile": {"layers": [{"name": "a", "forward_ms": {"cpu": 1.0}}]},
            "cluster": {"devices": [{"name": "cpu:0", "type": "cpu", "memory_bytes": 10}]},
        }
    )


@pytest.fixture(params=["sync", "async"])
def flavour(request):
    return request.param


@pytest.fixture
def pauses(monkeypatch):
    """Record pauses instead of waiting."""
    noted: list[float] = []

    async def asleep(seconds):
        noted.append(seconds)

    monkeypatch.setattr("placer_client.client.time.sleep", noted.append)
    monkeypatch.setattr("placer_client.async_client.asyncio.sleep", asleep)
    return noted


class Script:
    """Transport that returns its replies in turn and raises exceptions; the last one repeats."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.calls: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.calls.append(request)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        status, content, *headers = reply
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return httpx.Response(status, content=body, headers=headers[0] if headers else {})

    @property
    def lines(self) -> list[str]:
        return [f"{call.method} {call.url.path}" for call in self.calls]


@pytest.fixture
def ask(flavour):
    """Return ``ask(script, method, *arguments)``, which calls a sync or async client."""

    def run(script, method, *arguments, **options):
        transport = httpx.MockTransport(script)
        if flavour == "sync":
            with Client(URL, transport=transport, **options) as client:
                return getattr(client, method)(*arguments)

        async def go():
            async with AsyncClient(URL, transport=transport, **options) as client:
                return await getattr(client, method)(*arguments)

        return asyncio.run(go())

    return run


def test_a_client_that_is_closed_says_so(flavour):
    # httpx's RuntimeError came through.
    message = r"^this client of http://service\.test is closed; make another client$"
    transport = httpx.MockTransport(Script((200, DONE)))
    if flavour == "sync":
        client = Client(URL, transport=transport)
        client.close()
        for call in (client.health, lambda: next(client.events(KEY))):
            with pytest.raises(InputError, match=message):
                call()
        return

    async def go():
        client = AsyncClient(URL, transport=transport)
        await client.aclose()
        for call in (client.health, lambda: anext(client.events(KEY))):
            with pytest.raises(InputError, match=message):
                await call()

    asyncio.run(go())


def test_place_posts_the_request_and_returns_the_placement(ask, request_):
    script = Script((200, DONE))
    assert ask(script, "place", request_) == Placement.model_validate(DONE)
    assert PlacementRequest.model_validate_json(script.calls[0].content) == request_
    assert json.loads(script.calls[0].content)["schema_version"] == "3"


COPIES = LayerMap(
    layer_devices={"a": "cpu:0"},
    replicas={"cpu:0": (Replica(device="cpu:0", samples=1), Replica(device="cpu:1", samples=1))},
)


@pytest.mark.parametrize(
    ("given", "options", "query", "content"),
    [
        ({"a": "cpu:0"}, {"id": KEY}, f"id={KEY}", {"layer_devices": {"a": "cpu:0"}}),
        (
            "1,1",
            {"id": KEY, "format": "vllm", "best": True},
            f"id={KEY}&best=true",
            {"text": "1,1", "format": "vllm"},
        ),
        (COPIES, {"id": KEY}, f"id={KEY}", COPIES.model_dump(mode="json")),
    ],
)
def test_evaluate_posts_a_map_or_a_text(flavour, given, options, query, content):
    script = Script((200, {"valid": True, "faults": [], "objective": "throughput"}))
    transport = httpx.MockTransport(script)
    if flavour == "sync":
        assert Client(URL, transport=transport).evaluate(given, **options).valid
    else:
        assert asyncio.run(AsyncClient(URL, transport=transport).evaluate(given, **options)).valid
    assert script.calls[0].url.query.decode() == query
    assert json.loads(script.calls[0].content) == content


def test_compare_posts_the_replicas_of_maps_that_have_some(ask):
    script = Script(
        (200, {"names": [], "evaluations": [], "best": None, "moves": [], "moved_layers": 0})
    )
    ask(script, "compare", {"alone": {"a": "cpu:0"}, "copies": COPIES}, [KEY])
    assert json.loads(script.calls[0].content) == {
        "maps": {"alone": {"a": "cpu:0"}, "copies": {"a": "cpu:0"}},
        "replicas": {"copies": COPIES.model_dump(mode="json")["replicas"]},
    }


def test_place_polls_until_the_placement_is_there(ask, request_):
    script = Script((202, RUNNING), (202, RUNNING), (200, DONE))
    assert ask(script, "place", request_).status == "optimal"
    assert script.lines == [
        "POST /v1/placements",
        f"GET /v1/placements/{KEY}",
        f"GET /v1/placements/{KEY}",
    ]


def test_models_are_asked_for_again_until_their_placements_are_there(ask):
    content = examples.joint_requests()["pipeline"]["value"]
    request, answer = JointRequest.model_validate(content), {"runs": {}, "joint": DONE}
    script = Script((202, RUNNING), (200, answer))
    assert ask(script, "place_together", request).joint.id == KEY
    assert script.lines == ["POST /v1/placements:together"] * 2
    assert all("on_disconnect=stop" in str(call.url) for call in script.calls)
    assert JointRequest.model_validate_json(script.calls[0].content) == request
    assert json.loads(script.calls[0].content)["schema_version"] == "3"
    with pytest.raises(TimeoutExceeded, match=rf"stop\('{KEY}'\)"):
        ask(Script((202, RUNNING)), "place_together", request, 0)


def test_a_request_for_one_model_is_not_sent_as_one_for_several(ask, request_):
    script = Script((200, DONE))
    with pytest.raises(InputError, match=r"PlacementRequest; give a placer\.schema\.JointRequest"):
        ask(script, "place_together", request_)
    assert not script.calls


def test_place_gives_up_after_wait_and_says_how_to_get_the_answer_later(ask, request_):
    with pytest.raises(
        TimeoutExceeded, match=rf"7, bound 3\.0.*placement\('{KEY}'\).*stop\('{KEY}'\)"
    ):
        ask(Script((202, RUNNING)), "place", request_, 0)


def test_an_infeasible_placement_is_an_answer(ask, request_):
    infeasible = {**DONE, "status": "infeasible", "infeasible": {"reason": "too large"}}
    assert ask(Script((200, infeasible)), "place", request_).status == "infeasible"


def test_stop_and_placement_ask_by_id(ask):
    script = Script((200, DONE))
    assert ask(script, "stop", KEY).id == ask(script, "placement", KEY).id == KEY
    assert script.lines == [f"DELETE /v1/placements/{KEY}", f"GET /v1/placements/{KEY}"]


def test_cluster_and_health_are_read(ask):
    cluster = {"devices": [{"name": "cpu:0", "type": "cpu", "memory_bytes": 10}]}
    assert ask(Script((200, cluster)), "cluster") == Cluster.model_validate(cluster)
    assert ask(Script((200, {"status": "ok", "version": "1.2"})), "health").version == "1.2"


@pytest.mark.parametrize("status", [400, 413, 415, 422])
def test_a_fault_of_the_request_is_an_input_error_with_the_services_words(ask, request_, status):
    script = Script((status, {"detail": "layers.0.forward_ms: NaN"}))
    with pytest.raises(InputError, match=r"layers\.0\.forward_ms: NaN"):
        ask(script, "place", request_)
    assert len(script.calls) == 1


def test_what_is_no_request_is_named_and_not_sent(ask, request_):
    script = Script()
    with pytest.raises(
        InputError, match=r"a Profile; give a placer\.PlacementRequest\(profile=profile\)"
    ):
        ask(script, "place", request_.profile)
    assert not script.calls


def test_one_request_for_many_and_an_id_for_a_graph_are_told_what_to_ask_instead(ask, request_):
    with pytest.raises(
        InputError, match=r"requests is one PlacementRequest; .* call place\(request\)"
    ):
        ask(Script(), "place_many", request_)
    with pytest.raises(InputError, match=r"requests is an int; give a list of placer\.Placement"):
        ask(Script(), "place_many", 3)
    with pytest.raises(InputError, match=r"the request is a str; .* stored_profile\(id\)"):
        ask(Script(), "profile", KEY)


def test_an_estimate_is_asked_for_with_the_whole_graph(ask):
    asked = EstimateRequest.model_validate(examples.estimates()["two cards"]["value"])
    device = DeviceEstimate(device="cuda:0", layers=1, memory=MemoryUse(), total_bytes=5)
    answer = Estimate(model="Example", devices=(device,))
    script = Script((200, answer.model_dump_json().encode()))
    assert ask(script, "estimate", asked) == answer
    assert script.lines == ["POST /v1/estimates"]
    assert EstimateRequest.model_validate_json(script.calls[0].content) == asked
    with pytest.raises(InputError, match="the request is a dict; give a placer"):
        ask(script, "estimate", {})


def test_what_is_no_node_and_no_cluster_is_named_and_not_sent(ask):
    script = Script()
    node = Node(name="a", created_s=1.0, devices=("cuda:0",), types=("gpu",))
    with pytest.raises(InputError, match=r"nodes is 'ab'; give a list of names, \['ab'\]"):
        ask(script, "cluster", "ab")
    with pytest.raises(InputError, match=r"a node is a Node; give its name, such as node\.name"):
        ask(script, "cluster", [node])
    with pytest.raises(InputError, match=r"a node is a Node; give its name, such as node\.name"):
        ask(script, "forget_node", node)
    with pytest.raises(
        InputError,
        match=r"cluster is a dict; give a Cluster, such as client\.cluster\(\) of that node",
    ):
        ask(script, "register_node", "a", {"devices": []})
    assert not script.calls


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_a_server_or_a_key_that_is_no_text_is_named(client):
    with pytest.raises(InputError, match="server is an int; give a URL"):
        client(8080)
    with pytest.raises(InputError, match="the key is an int; give the text"):
        client(URL, key=1234)


@pytest.mark.parametrize("method", ["placement", "stop", "request", "timeline", "stored_profile"])
def test_a_placement_in_place_of_its_id_is_named_and_not_sent(ask, method):
    # It was a TypeError of urllib: quote_from_bytes() expected bytes.
    script = Script()
    with pytest.raises(InputError, match=r"the id is a Placement; give .* placement\.id"):
        ask(script, method, Placement.model_validate(DONE))
    assert not script.calls


def test_a_placement_in_place_of_the_id_of_events_is_named():
    with Client(URL) as client, pytest.raises(InputError, match=r"the id is a Placement; give"):
        next(client.events(Placement.model_validate(DONE)))


def test_ids_in_place_of_maps_are_told_where_they_go(ask):
    # It was an AttributeError: 'list' object has no attribute 'items'.
    with pytest.raises(InputError, match=r"maps is a list; .*ids=\[\.\.\.\]"):
        ask(Script(), "compare", [KEY, KEY])
    with pytest.raises(InputError, match=r"a map is a str; .* placement\.layer_devices"):
        ask(Script(), "compare", {"mine": KEY})


@pytest.mark.parametrize("where", ["https://service.test/v1/placements", "/moved"])
def test_a_service_that_has_moved_is_told_with_its_place(ask, request_, where):
    # A proxy that wants https answers so; it was "answered 301: Moved Permanently".
    told = httpx.URL(URL).join(where)
    with pytest.raises(ServerError, match=f"answered 301: it moved to {told}; use that URL"):
        ask(Script((301, b"", {"Location": where})), "place", request_)


@pytest.mark.parametrize("status", [404, 500, 501])
def test_another_problem_is_a_server_error_with_its_status_and_is_not_repeated(ask, status):
    script = Script((status, {"detail": "no such placement"}))
    with pytest.raises(ServerError, match="no such placement") as caught:
        ask(script, "placement", KEY)
    assert (caught.value.status, len(script.calls)) == (status, 1)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_service_is_asked_again(ask, request_, pauses, status):
    script = Script((status, {"detail": "busy"}), (200, DONE))
    assert ask(script, "place", request_).status == "optimal"
    assert len(pauses) == 1


def test_retry_after_is_honoured(ask, request_, pauses):
    ask(Script((429, {}, {"Retry-After": "17"}), (200, DONE)), "place", request_)
    assert pauses == [17.0]


@pytest.mark.parametrize("wait", [0, 5.0])
def test_who_does_not_wait_so_long_is_told_at_once_that_the_service_is_busy(
    ask, request_, pauses, wait
):
    busy = (429, {"detail": "the queue is full"}, {"Retry-After": "30"})
    with pytest.raises(ServerError, match="the queue is full"):
        ask(Script(busy), "place", request_, wait)
    assert pauses == []


@pytest.mark.parametrize("given", ["soon", "-5", "Wed, 21 Oct 2015 07:28:00 GMT", ""])
def test_a_retry_after_that_says_nothing_is_a_short_pause(ask, request_, pauses, given):
    ask(Script((503, {}, {"Retry-After": given}), (200, DONE)), "place", request_)
    assert 0 < pauses[0] <= exchange.FIRST_PAUSE_S


def test_a_retry_after_of_a_day_is_not_slept_through(ask, request_, pauses):
    ask(Script((503, {}, {"Retry-After": "86400"}), (200, DONE)), "place", request_)
    assert pauses == [exchange.MAX_PAUSE_S]


@pytest.mark.parametrize(
    "fault", [httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError, httpx.ReadTimeout]
)
def test_a_call_that_failed_on_the_way_is_repeated(ask, request_, pauses, fault):
    script = Script(fault("reset"), fault("reset"), (200, DONE))
    assert ask(script, "place", request_).status == "optimal"
    assert len(script.calls) == 3


def test_a_service_that_starts_again_is_waited_for_half_a_minute(ask, request_, pauses):
    # Its start takes a second or two, and a client gave up after one and a half: also on what had
    # been accepted.
    away = [httpx.ConnectError("refused")] * (exchange.RESTART_RETRIES + 3)
    assert ask(Script((202, RUNNING), *away, (200, DONE)), "place", request_).status == "optimal"
    assert 12 < sum(pauses) < 26
    assert (
        ask(Script(httpx.ReadError("killed"), *away, (200, DONE)), "place", request_).status
        == "optimal"
    )


def test_a_service_that_answered_an_earlier_call_is_waited_for_too(request_, pauses):
    away = [httpx.ConnectError("refused")] * (exchange.RESTART_RETRIES + 3)
    with Client(
        URL, transport=httpx.MockTransport(Script((200, DONE), *away, (200, DONE)))
    ) as client:
        assert [client.place(request_).status for _ in range(2)] == ["optimal"] * 2
    assert 12 < sum(pauses) < 26


def test_a_service_that_was_never_there_is_not_waited_for(ask, request_, pauses):
    with pytest.raises(UnreachableError, match="tried 5 times"):
        ask(Script(httpx.ConnectError("refused")), "place", request_)
    with pytest.raises(UnreachableError, match=r"refused; start"):
        ask(Script((202, RUNNING), httpx.ConnectError("refused")), "place", request_, retries=0)


def test_a_stream_that_told_something_is_taken_up_again_from_a_service_that_starts_again():
    def refusals(stream):
        stream_of_events, pauses = EventStream(exchange.Sender(URL, 4), KEY), []
        list(stream_of_events.read(stream))
        with pytest.raises(UnreachableError):
            while len(pauses) < 100:
                pauses.append(stream_of_events.pause_s(httpx.ConnectError("refused")))
        return len(pauses)

    assert refusals(b"") == 4
    assert (
        refusals(f"event: progress\ndata: {json.dumps(RUNNING)}\n\n".encode())
        == 4 + exchange.RESTART_RETRIES
    )


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_of_a_stream_end_where_its_standard_says_and_not_within_names(flavour, end):
    # httpx's iter_lines ends lines at U+0085, U+2028 and U+2029, too, which JSON has as they are.
    done = DONE | {"layer_devices": {"a\x85b\u2028c\u2029": "cpu:0", "\U0001f600": "cpu:0"}}
    stream = f"event: done{end}data: {json.dumps(done, ensure_ascii=False)}{end}{end}\n".encode()

    async def broken():
        for number in range(len(stream)):
            yield stream[number : number + 1]

    async def go():
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=broken()))
        async with AsyncClient(URL, transport=transport) as client:
            return [one async for one in client.events(KEY)]

    if flavour == "async":
        told = asyncio.run(go())
    else:
        pieces = (stream[number : number + 1] for number in range(len(stream)))
        with Client(
            URL, transport=httpx.MockTransport(lambda _: httpx.Response(200, content=pieces))
        ) as client:
            told = list(client.events(KEY))
    assert told == [Placement.model_validate(done)]


def test_pauses_double(ask, request_, pauses):
    ask(Script(*[httpx.ConnectError("refused")] * 4, (200, DONE)), "place", request_)
    for attempt, pause in enumerate(pauses):
        assert 0.5 <= pause / (exchange.FIRST_PAUSE_S * 2**attempt) <= 1.0


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (httpx.ConnectError("refused"), UnreachableError),
        (httpx.ConnectTimeout(""), UnreachableError),
        (httpx.ReadError("reset"), UnreachableError),
        (httpx.ReadTimeout(""), TimeoutExceeded),
        (httpx.DecodingError("bad gzip"), UnreachableError),
    ],
)
def test_a_service_that_never_answers_is_a_typed_error_that_names_it(
    ask, request_, pauses, fault, error
):
    script = Script(fault)
    with pytest.raises(error, match=r"service\.test.*tried 3 times"):
        ask(script, "place", request_, retries=2)
    assert len(script.calls) == 3


def test_a_service_that_stays_busy_is_a_server_error_at_the_end(ask, request_, pauses):
    script = Script((429, {"detail": "the queue is full"}))
    with pytest.raises(ServerError, match="queue is full") as caught:
        ask(script, "place", request_, retries=1)
    assert (caught.value.status, len(script.calls)) == (429, 2)


@pytest.mark.parametrize(
    "body", [b"<html>hello</html>", b"{}", b"[" * 100_000, b'{"status": "optimal"', b"\xff"]
)
def test_another_service_at_that_url_is_a_server_error(ask, request_, body):
    with pytest.raises(ServerError, match="is not a Placer service"):
        ask(Script((200, body)), "place", request_)


@pytest.mark.parametrize(
    "body", [b"<html>bad gateway</html>", b"[]", b"[" * 100_000, b'{"detail": 5}', b""]
)
def test_a_problem_that_is_none_is_still_a_typed_error(ask, body):
    with pytest.raises(ServerError, match="answered 500"):
        ask(Script((500, body)), "placement", KEY)


def test_the_service_may_take_its_wait_before_the_client_times_out(ask, request_):
    script = Script((200, DONE))
    ask(script, "place", request_, 5, timeout=2)
    assert float(script.calls[0].url.params["wait"]) == pytest.approx(5, abs=0.5)
    assert script.calls[0].extensions["timeout"]["read"] == pytest.approx(7, abs=0.5)
    assert script.calls[0].extensions["timeout"]["connect"] == 2


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_the_server_comes_from_the_environment(monkeypatch, kind):
    monkeypatch.setenv("PLACER_URL", "http://elsewhere:1234/")
    assert kind().url == "http://elsewhere:1234"


@pytest.mark.parametrize(
    "server", ["", "localhost:8080", "ftp://host", "http://", "http://[::1", "http://host:port"]
)
def test_a_server_that_is_no_url_is_an_input_error_that_shows_one(monkeypatch, server):
    monkeypatch.delenv("PLACER_URL", raising=False)
    with pytest.raises(InputError, match="http://host:8080"):
        Client(server)


def test_both_clients_have_the_same_methods_with_the_same_arguments():
    def methods(kind):
        found = {
            name: inspect.signature(what)
            for name, what in vars(kind).items()
            if inspect.isfunction(what)
        }
        return {
            name.removeprefix("a"): list(found[name].parameters) for name in found if name[0] != "_"
        }

    assert methods(Client) == methods(AsyncClient)


def test_the_client_says_which_version_it_reads(ask):
    script = Script((200, {"status": "ok", "version": "1.2"}))
    ask(script, "health")
    assert script.calls[0].headers["Placer-Schema-Version"] == "1, 2, 3"


def test_the_client_imports_neither_torch_nor_the_server_nor_the_solver():
    names = "('torch', 'ortools', 'placer_server')"
    code = (
        "import sys, placer_client.client;"
        f" print([name for name in sys.modules if name in {names}])"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("data", ["{", "[]", "null", '{"status": "x"}', '{"status": []}'])
def test_a_stream_that_ends_with_a_problem_that_is_none_is_still_a_typed_error(data):
    script = Script(
        (200, f"event: failed\ndata: {data}\n\n".encode(), {"Content-Type": "text/event-stream"})
    )
    with (
        Client(URL, transport=httpx.MockTransport(script)) as client,
        pytest.raises(ServerError, match="gives no reason"),
    ):
        list(client.events(KEY))


class Batches:
    """Service that limits the size of batches, and fails after a number of answers."""

    def __init__(self, most_bytes: int = 2**30, calls: int = 100) -> None:
        self.most_bytes, self.calls = most_bytes, calls
        self.sizes: list[int] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if len(request.content) > self.most_bytes:
            return httpx.Response(
                413, json={"detail": f"{len(request.content)} bytes are too many"}
            )
        batch = Batch.model_validate_json(request.content)
        self.sizes.append(len(batch.requests))
        if len(self.sizes) > self.calls:
            return httpx.Response(500, json={"detail": "broken"})
        asked = [PlacementRequest.model_validate({**batch.shared, **one}) for one in batch.requests]
        answers = [
            {"status": 200, "placement": {**DONE, "id": one.content_hash()}} for one in asked
        ]
        return httpx.Response(200, json={"answers": answers})


def named(request, model):
    return request.model_copy(
        update={"profile": request.profile.model_copy(update={"model": model})}
    )


def many(request, count):
    return [request.model_copy(update={"seed": seed}) for seed in range(count)]


def test_a_batch_is_no_larger_than_a_service_takes_and_checks_in_time(ask, request_, monkeypatch):
    # 24 questions of 4 MB in one call were refused, all of them; the profile that they share is
    # checked for each.
    asked = many(named(request_, "x" * 500), 7)
    monkeypatch.setattr("placer_client.bodies.BATCH_BYTES", 2300)
    service = Batches()
    assert [found.id for found in ask(service, "place_many", asked)] == [
        one.content_hash() for one in asked
    ]
    assert service.sizes == [3, 3, 1]


def test_a_batch_that_is_too_large_for_a_service_is_asked_in_parts_and_only_what_fails_alone_fails(
    ask, request_
):
    asked = many(request_, 8)
    asked[5] = named(asked[5], "x" * 500)
    service = Batches(most_bytes=600)
    found = ask(service, "place_many", asked)
    assert isinstance(found.pop(5), InputError)
    assert [one.id for one in found] == [one.content_hash() for one in asked if one.seed != 5]
    assert service.sizes == [4, 1, 2]


def test_answers_are_not_lost_with_a_later_batch_that_fails(ask, request_):
    found = ask(Batches(calls=1), "place_many", many(request_, 66))
    assert all(isinstance(one, Placement) for one in found[:64])
    assert [str(one) for one in found[64:]] == [f"the service at {URL} answered 500: broken"] * 2
    with pytest.raises(ServerError, match="broken"):
        ask(Batches(calls=0), "place_many", many(request_, 66))


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize("rest", ["/v1", "/v1/", "/prefix/v1", "/?wait=1", "/#page"])
def test_the_url_of_a_part_of_the_service_is_refused(client, rest):
    # The client appends its paths, so that /v1 became /v1/v1, and a query swallowed the path.
    with pytest.raises(InputError, match="leave out /v1 and what follows"):
        client(f"http://host:8080{rest}")


@pytest.mark.parametrize("host", ["a..b", ".", "a" * 64, "xn--"])
def test_a_host_that_no_resolver_accepts_is_refused(host):
    with pytest.raises(InputError, match="is not a URL"):
        Client(f"http://{host}")


@pytest.mark.parametrize(
    "given",
    [{"timeout": value} for value in (-1, 0, "x", None, True, float("nan"), float("inf"))]
    + [{"retries": value} for value in (-1, 1.5, "2", None, True)],
)
@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_a_number_that_a_client_cannot_use_is_named(client, given):
    with pytest.raises(InputError, match=f"^{next(iter(given))} is "):
        client("http://host", **given)


@pytest.mark.parametrize("wait", ["5", float("nan"), [1]])
def test_a_wait_that_is_no_number_of_seconds_is_named_and_not_sent(ask, request_, wait):
    with pytest.raises(InputError, match=r"^wait is "):
        ask(_unreached, "place", request_, wait)


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_name_that_would_lead_to_another_path_is_named_and_not_sent(ask, name):
    for method in ("placement", "forget_node"):
        with pytest.raises(InputError, match="names nothing"):
            ask(_unreached, method, name)


def _unreached(request: httpx.Request) -> httpx.Response:
    raise AssertionError(f"{request.url} was asked for")
