"""Measurements of graphs that clients send, in a worker process that affects no other request."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys

import pytest
from accepted import accepted_graphs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from placer.schema import Profile
from placer_server.jobs import measurements
from placer_server.openapi import examples
from placer_server.problem import MAX_BYTES
from placer_server.store.database import StoreError
from placer_server.store.store import Store
from placer_server.workers import measuring
from placer_server.workers.solving import default_solver
from placer_server.workers.worker import CONTEXT


@pytest.fixture
def graph_body():
    """Return ``graph_body(**changes)``, a valid request; other repeats give another id."""

    def make(**changes):
        return {**copy.deepcopy(examples.graphs()["one layer"]["value"]), **changes}

    return make


def operations(body, *steps, results=None):
    layer = body["graph"]["layers"][0]
    layer["operations"] = [{"out": f"n{index}", **step} for index, step in enumerate(steps)]
    layer["results"] = [results or f"n{len(steps) - 1}"]
    return body


def test_a_graph_is_measured_and_its_profile_placed_and_had_again(serve, graph_body, tmp_path):
    client = serve(default_solver, database=str(tmp_path / "p.db"))
    reply = client.post("/v1/profiles?wait=60", json=graph_body())
    assert reply.status_code == 200
    profile = Profile.model_validate_json(reply.content)
    assert [layer.name for layer in profile.layers] == ["linear"]
    assert profile.layers[0].param_bytes == 16 * 16 * 4
    assert profile.cluster is not None and profile.optimizer == "Adam"
    placed = client.post(
        "/v1/placements?wait=60", json={"schema_version": "3", "profile": reply.json()}
    )
    assert placed.json()["status"] == "optimal"
    assert client.get(reply.headers["Location"]).content == reply.content
    again = serve(database=str(tmp_path / "p.db"))
    assert again.get(reply.headers["Location"]).content == reply.content
    assert again.post("/v1/profiles?wait=0", json=graph_body()).content == reply.content


@pytest.mark.gpu
def test_on_a_gpu_node_a_graph_is_measured_on_its_gpus_within_the_default_limit_of_memory(
    serve, graph_body
):
    reply = serve().post("/v1/profiles?wait=60", json=graph_body())
    assert reply.status_code == 200, reply.text
    assert [device["name"] for device in reply.json()["cluster"]["devices"]] == ["cuda:0"]
    (kind,) = reply.json()["layers"][0]["forward_ms"]
    assert "NVIDIA" in kind


def test_a_graph_that_takes_longer_than_wait_is_202_and_then_there(serve, graph_body):
    client = serve()
    first = client.post("/v1/profiles?wait=0", json=graph_body())
    assert first.status_code == 202 and first.json()["status"] in ("queued", "running")
    assert client.get(first.headers["Location"], params={"wait": 60}).status_code == 200


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"op": "aten.from_file.default", "args": ["/etc/passwd"]}, "not among those"),
        ({"op": "aten.reshape.default", "args": [{"ref": "r0"}, [3, 3]]}, "layer 'linear'"),
        ({"op": "aten.zeros.default", "args": [[2**40]]}, "does not fit"),
    ],
)
def test_a_hostile_operation_is_422_and_named(service, graph_body, step, said):
    reply = service.post("/v1/profiles?wait=60", json=operations(graph_body(), step))
    assert reply.status_code == 422
    assert said in reply.json()["detail"]
    assert "/etc" not in reply.text and len(reply.content) <= MAX_BYTES


def test_a_value_of_a_layer_that_does_not_exist_is_422_and_named(service, graph_body):
    # The profile's writer met the name first, as a KeyError and a 500.
    content = graph_body()
    content["graph"]["values"][1]["source"] = "lineal"
    for path in ("/v1/profiles", "/v1/estimates"):
        reply = service.post(path, json={"graph": content["graph"]})
        assert reply.status_code == 422
        assert "source of value 'y': there is no layer 'lineal'" in reply.json()["detail"]


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_what_a_service_accepted_is_measured_by_its_next_start(start, graph_body, sig):
    first = start("quick")
    where = first.client.post("/v1/profiles?wait=0", json=graph_body()).headers["Location"]
    assert first.end(sig) == (0 if sig == signal.SIGTERM else -sig)
    again = start("quick")
    reply = again.client.get(where, params={"wait": 60})
    assert (reply.status_code, reply.json()["model"]) == (200, "Example")


def test_a_graph_for_another_node_is_left_to_that(database):
    store = Store(database, keep=1)
    for node in ("a", "b", "a"):
        store.accept_graph("k", node, b"body")
    store.put_measured("k", "a", b"profile")
    assert (accepted_graphs(store, "a"), accepted_graphs(store, "b"), store.measured("k")) == (
        [],
        [("k", b"body")],
        b"profile",
    )
    store.delete_graph("k", "b")
    assert accepted_graphs(store, "b") == []
    store.close()


def test_a_graph_that_cannot_be_written_is_not_said_to_be_accepted(serve, graph_body, monkeypatch):
    def full(*_):
        raise StoreError("no space left on device")

    client = serve()
    monkeypatch.setattr(client.app.state.service.store, "accept_graph", full)
    reply = client.post("/v1/profiles?wait=0", json=graph_body())
    assert (reply.status_code, reply.json()["type"]) == (503, "urn:placer:problem:not-kept")


def test_a_graph_that_cannot_be_measured_is_not_tried_again(serve, graph_body, tmp_path):
    client = serve(database=str(tmp_path / "p.db"))
    bad = operations(graph_body(), {"op": "os.system", "args": ["true"]})
    assert client.post("/v1/profiles?wait=60", json=bad).status_code == 422
    service = client.app.state.service
    assert accepted_graphs(service.store, service.settings.node_name) == []


def test_a_graph_that_takes_more_memory_than_allowed_is_422_and_the_service_goes_on(
    serve, graph_body
):
    client = serve(profile_memory_bytes=2 * 2**30)
    body = operations(graph_body(), {"op": "aten.ones.default", "args": [[2**31]]})
    reply = client.post("/v1/profiles?wait=60", json=body)
    assert reply.status_code == 422
    assert client.get("/readyz").status_code == 200


@pytest.mark.exhaustive
def test_a_graph_that_takes_too_long_is_killed(serve, graph_body, monkeypatch):
    pids, start = [], CONTEXT.Process.start

    def noted(process):
        # not one that waits for placements to solve
        is_ours = measuring.profile_graph in process._args
        start(process)
        pids.extend([process.pid] * is_ours)

    monkeypatch.setattr(CONTEXT.Process, "start", noted)
    steps = [{"op": "aten.ones.default", "args": [[3000, 3000]]}]
    steps += [
        {"op": "aten.matmul.default", "args": [{"ref": f"n{i}"}, {"ref": "n0"}]}
        for i in range(5000)
    ]
    reply = serve(profile_timeout_s=4).post(
        "/v1/profiles?wait=60", json=operations(graph_body(), *steps)
    )
    assert (reply.status_code, reply.json()["type"]) == (422, "urn:placer:problem:too-slow")
    (process,) = pids
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_process_that_dies_is_a_500_that_says_so_and_the_next_graph_is_measured(
    serve, graph_body, monkeypatch
):
    client = serve()
    monkeypatch.setattr(measuring, "profile_graph", die)
    reply = client.post("/v1/profiles?wait=60", json=graph_body())
    assert (reply.status_code, reply.json()["type"]) == (500, "urn:placer:problem:not-measured")
    monkeypatch.undo()
    assert client.post("/v1/profiles?wait=60", json=graph_body()).status_code == 200


def test_too_many_graphs_at_once_are_429(serve, graph_body, monkeypatch):
    monkeypatch.setattr(measurements, "MAX_WAITING", 1)
    client = serve()
    replies = [
        client.post("/v1/profiles?wait=0", json=graph_body(repeats=1 + number))
        for number in range(3)
    ]
    assert [reply.status_code for reply in replies] == [202, 202, 429]
    assert replies[2].headers["Retry-After"] == "10"


def test_a_rejected_graph_counts_as_a_rejection_in_the_metrics(serve, graph_body, monkeypatch):
    monkeypatch.setattr(measurements, "MAX_WAITING", 0)
    client = serve()
    for number in range(2):
        client.post("/v1/profiles?wait=0", json=graph_body(repeats=1 + number))
    assert "placer_rejections_total 1.0" in client.get("/metrics").text


def test_a_waiting_graph_is_answered_503_and_kept_when_the_service_stops(serve, graph_body):
    client = serve()
    service = client.app.state.service
    paths = [
        client.post("/v1/profiles?wait=0", json=graph_body(repeats=1 + number)).headers["Location"]
        for number in range(2)
    ]
    client.portal.call(service.measurements.stop_all)
    reply = client.get(paths[1], params={"wait": 30})
    assert (reply.status_code, reply.json()["type"]) == (503, "urn:placer:problem:stopping")
    kept = {key for key, _ in accepted_graphs(service.store, service.settings.node_name)}
    assert paths[1].rpartition("/")[2] in kept


def test_without_torch_graphs_are_501_and_it_says_what_to_do(serve, graph_body, monkeypatch):
    import solvers_for_tests

    monkeypatch.setattr(measuring, "profile_graph", solvers_for_tests.cluster_without_torch)
    reply = serve().post("/v1/profiles?wait=60", json=graph_body())
    assert reply.status_code == 501 and "pip install" in reply.json()["detail"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"null", b"[]", b'{"graph": {"layers": []}}', b"\xff", b"[" * 5000]
)
def test_what_is_no_graph_is_a_problem(service, body):
    reply = service.post(
        "/v1/profiles?wait=60", content=body, headers={"Content-Type": "application/json"}
    )
    assert reply.status_code in (400, 422) and len(reply.content) <= MAX_BYTES


def die(payload, report, stop):
    sys.stderr.flush()
    import os

    os.kill(os.getpid(), 11)


ARGUMENTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.just({"ref": "r0"}),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["ref", "dtype", "x"]), inner, max_size=2)
    ),
    max_leaves=6,
)
OPERATIONS = st.fixed_dictionaries(
    {
        "op": st.sampled_from(
            ["aten.add.Tensor", "aten.cat.default", "number.mul", "placer.enter", "x"]
        )
        | st.text(max_size=9)
    },
    optional={
        "args": st.lists(ARGUMENTS, max_size=3),
        "out": st.text(max_size=4),
        "kwargs": ARGUMENTS,
    },
)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(OPERATIONS, max_size=3), st.lists(ARGUMENTS, max_size=2))
def test_whatever_a_graph_holds_its_reader_says_what_is_wrong_or_takes_it(steps, results):
    from placer.errors import InputError
    from placer.profiler.remote.replay import rebuild
    from placer.schema.graph import ProfileRequest

    body = copy.deepcopy(examples.graphs()["one layer"]["value"])
    body["graph"]["layers"][0].update(operations=steps, results=results)
    try:
        rebuild(ProfileRequest.model_validate_json(json.dumps(body)).graph)
    except (ValueError, InputError):
        pass
