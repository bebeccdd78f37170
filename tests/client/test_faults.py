"""Clients against a real service through network faults.

Safe requests are repeated, others never.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Iterator

import httpx
import pytest
from faulty_network import AFTER, BEFORE, Async, Faulty, Sync

from placer.errors import InputError, PlacerError, ServerError, TimeoutExceeded, UnreachableError
from placer.schema import Cluster, Placement, PlacementRequest, Progress
from placer_client import AsyncClient, Client
from placer_server.app import background
from placer_server.openapi import examples
from placer_server.settings import Settings


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    settings = Settings(
        port=0, database=":memory:", workers=1, queue=16, log_level="error", stop_grace_s=1.0
    )
    with background(settings) as url:
        yield url


def request(**changes):
    return PlacementRequest.model_validate(examples.requests()["throughput"]["value"] | changes)


def long_request(seed):
    """Return a request of 200 free layers, whose solve takes its whole time limit."""
    names = [f"l{index}" for index in range(200)]
    times = random.Random(seed)
    layers = [{"name": name, "forward_ms": {"gpu": times.uniform(1, 3)}} for name in names]
    edges = [
        {
            "source": one,
            "targets": [names[min(199, index + step)] for step in (1, 7)],
            "bytes": 2**26,
        }
        for index, one in enumerate(names[:-1])
    ]
    cluster = examples.requests()["throughput"]["value"]["cluster"]
    return PlacementRequest.model_validate(
        {
            "profile": {
                "layers": layers,
                "edges": [e | {"targets": sorted(set(e["targets"]))} for e in edges],
            },
            "cluster": cluster,
            "objective": "latency",
            "constraints": {"contiguous": False},
            "time_limit_s": 60,
            "seed": seed,
        }
    )


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("placer_client.exchange.FIRST_PAUSE_S", 0.001)


@pytest.fixture(params=["sync", "async"])
def ask(request, service):
    """Return ``ask(faulty, method, ...)``, which calls a client's method and lists an iterator."""

    def call(faulty, method, *arguments, retries=4, **options):
        if request.param == "sync":
            with Client(service, transport=Sync(faulty), retries=retries) as client:
                found = getattr(client, method)(*arguments, **options)
                return list(found) if inspect.isgenerator(found) else found

        async def go():
            async with AsyncClient(service, transport=Async(faulty), retries=retries) as client:
                found = getattr(client, method)(*arguments, **options)
                return [one async for one in found] if inspect.isasyncgen(found) else await found

        return asyncio.run(go())

    return call


@pytest.mark.covering
@pytest.mark.parametrize("fault", [*BEFORE, *AFTER])
def test_a_placement_comes_through_every_fault(ask, fault):
    found = ask(Faulty(fault, fault), "place", request(seed=1))
    assert found.status == "optimal"


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("fault", [*BEFORE, *AFTER])
def test_what_reads_comes_through_every_fault(ask, fault):
    key = ask(Faulty(), "place", request()).id
    assert ask(Faulty(fault), "timeline", key).id == key
    assert ask(Faulty(fault), "request", key) == request()
    assert ask(Faulty(fault), "page", "Example").placements
    assert ask(
        Faulty(fault), "evaluate", ask(Faulty(), "placement", key).layer_devices, request()
    ).valid
    assert ask(Faulty(fault), "events", key)[-1].id == key


def test_random_runs_of_faults_end_in_the_answer_or_a_typed_error(ask):
    chance = random.Random(7)
    for seed in range(15):
        faults = [chance.choice([*BEFORE, *AFTER, ""]) for _ in range(chance.randrange(7))]
        try:
            assert ask(Faulty(*faults), "place", request(seed=seed), retries=3).status == "optimal"
        except PlacerError as error:
            first = next(number for number, fault in enumerate([*faults, ""]) if not fault)
            assert first > 3, (faults, error)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("refused", UnreachableError, "no service answers at .*refused.*tried 3 times"),
        ("read timeout", TimeoutExceeded, "did not answer in time.*tried 3 times"),
        ("half", UnreachableError, "the answer is incomplete.*tried 3 times"),
        ("429", ServerError, "answered 429: not now"),
        ("502", ServerError, "answered 502"),
    ],
)
def test_what_does_not_end_is_a_clear_error(ask, fault, kind, words):
    with pytest.raises(kind, match=words):
        ask(Faulty(*[fault] * 9), "place", request(seed=2), retries=2)


@pytest.mark.covering
@pytest.mark.parametrize("fault", AFTER)
def test_a_solve_is_not_stopped_again_where_the_answer_to_the_first_stop_was_lost(ask, fault):
    asked = long_request(AFTER.index(fault))
    key = ask(Faulty(), "submit", asked).id
    faulty = Faulty(fault)
    # a proxy's word: what became of it is for the caller to find out
    if fault in ("502", "504"):
        with pytest.raises(ServerError, match=fault):
            ask(faulty, "stop", key)
    else:
        assert ask(faulty, "stop", key).id == key
    assert [line.split()[0] for line in faulty.seen].count("DELETE") == 1


@pytest.mark.covering
@pytest.mark.parametrize("fault", BEFORE)
def test_a_stop_that_never_arrived_is_sent_again(ask, fault):
    key = ask(Faulty(), "submit", long_request(10 + BEFORE.index(fault))).id
    faulty = Faulty(fault)
    assert ask(faulty, "stop", key).id == key
    assert faulty.seen == [f"DELETE /v1/placements/{key}"]


@pytest.mark.parametrize("fault", AFTER)
def test_devices_are_not_measured_again_where_the_answer_was_lost(ask, fault):
    cluster = examples.requests()["throughput"]["value"]["cluster"]
    faulty = Faulty(fault, answer=httpx.Response(200, json=cluster))
    with pytest.raises(ServerError, match=r"incomplete|check before|answered 50"):
        ask(faulty, "measure_cluster")
    assert faulty.seen == ["POST /v1/cluster:measure"]


@pytest.mark.parametrize("fault", BEFORE)
def test_devices_are_measured_where_the_service_had_seen_nothing(ask, fault):
    cluster = examples.requests()["throughput"]["value"]["cluster"]
    faulty = Faulty(fault, answer=httpx.Response(200, json=cluster))
    assert len(ask(faulty, "measure_cluster").devices) == 2
    assert faulty.seen == ["POST /v1/cluster:measure"]


def test_nodes_that_registered_are_listed_joined_and_forgotten(ask):
    cluster = Cluster.model_validate(examples.clusters()["two devices"]["value"])
    for name in ("a", "b"):
        assert ask(Faulty("lost"), "register_node", name, cluster).devices == ("cuda:0", "cuda:1")
    assert [node.name for node in ask(Faulty(), "nodes")] == ["a", "b"]
    joined = ask(Faulty(), "cluster", ["a", "b"], network_bytes_per_s=1e9, network_latency_s=1e-3)
    assert [device.name for device in joined.devices] == [
        "a/cuda:0",
        "a/cuda:1",
        "b/cuda:0",
        "b/cuda:1",
    ]
    assert joined.link("a/cuda:0", "b/cuda:1").latency_s == pytest.approx(1e-3)
    with pytest.raises(InputError, match="give network_bytes_per_s"):
        ask(Faulty(), "cluster", ["a", "b"])
    for name in ("a", "b"):
        ask(Faulty(), "forget_node", name)
    assert ask(Faulty(), "nodes") == ()
    with pytest.raises(ServerError, match="node 'a' is not registered"):
        ask(Faulty(), "cluster", ["a"])


@pytest.mark.parametrize(
    "fault", [fault for fault in AFTER if fault != "half"]
)  # an empty answer has none
def test_a_node_is_not_forgotten_again_where_the_answer_was_lost(ask, fault):
    faulty = Faulty(fault, answer=httpx.Response(204))
    with pytest.raises(ServerError, match=r"check before|answered 50"):
        ask(faulty, "forget_node", "a")
    assert faulty.seen == ["DELETE /v1/nodes/a"]


def test_events_tell_of_a_solve_until_it_ends_and_take_a_broken_stream_up_again(ask):
    asked = long_request(20).model_copy(update={"time_limit_s": 2.0})
    key = ask(Faulty(), "submit", asked).id
    told = ask(Faulty("refused", "503", "lost"), "events", key)
    assert all(isinstance(one, Progress) and one.id == key for one in told[:-1])
    assert isinstance(told[-1], Placement)
    assert told[-1].layer_devices


def test_events_of_nothing_are_an_error(ask):
    with pytest.raises(ServerError, match="there is no placement"):
        ask(Faulty(), "events", "0" * 32)


def test_many_are_asked_with_what_they_share_sent_once(ask):
    faulty = Faulty("lost")
    asked = [request(), request(objective="latency"), request(chunks=8)]
    answers = ask(faulty, "place_many", asked)
    assert [answer.id for answer in answers] == [one.content_hash() for one in asked]
    assert set(faulty.seen) == {"POST /v1/placements:batch"}


def test_of_many_each_has_its_own_error(ask, monkeypatch):
    wrong = request().model_copy(update={"time_limit_s": -1.0})
    answers = ask(Faulty(), "place_many", [request(), wrong])
    assert answers[0].status == "optimal"
    assert isinstance(answers[1], InputError)
    assert "time_limit_s" in str(answers[1])


def test_more_than_the_queue_takes_is_asked_again_until_it_is_there(ask):
    asked = [request(seed=1000 + number, time_limit_s=1) for number in range(24)]
    answers = ask(Faulty(), "place_many", asked)
    assert [answer.id for answer in answers] == [one.content_hash() for one in asked]


def test_history_goes_through_all_pages(ask, monkeypatch):
    keys = {ask(Faulty(), "place", request(seed=2000 + number)).id for number in range(3)}
    found = [summary.id for summary in ask(Faulty(), "history", "Example")]
    assert keys <= set(found)
    assert len(set(found)) == len(found)
    page = ask(Faulty(), "page", limit=2)
    assert len(page.placements) == 2
    assert ask(Faulty(), "page", limit=2, cursor=page.next).placements[0].id not in {
        one.id for one in page.placements
    }


def test_maps_are_compared_and_profiles_read_back(ask):
    placement = ask(Faulty(), "place", request())
    even = {"embed": "cuda:0", "block.0": "cuda:0", "block.1": "cuda:1", "head": "cuda:1"}
    found = ask(Faulty(), "compare", {"even": even}, [placement.id])
    assert found.names == (placement.id, "even")
    key = ask(Faulty(), "page", placement.id).placements[0].profile_id
    assert ask(Faulty(), "stored_profile", key) == request().profile
    assert "<html" in ask(Faulty(), "report", placement.id)
    assert '"traceEvents"' in ask(Faulty(), "trace", placement.id)
    assert ask(Faulty(), "export", placement.id, "vllm").text == "1,1"
