from __future__ import annotations

import itertools
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from placer.schema import Placement, PlacementRequest
from placer_server.openapi import examples
from placer_server.workers.solving import default_solver


def backwards(content):
    """Return the same JSON with every object's names in the opposite order."""
    if isinstance(content, dict):
        return {name: backwards(value) for name, value in reversed(content.items())}
    return [backwards(value) for value in content] if isinstance(content, list) else content


def test_a_request_is_answered_with_its_placement(serve, request_body):
    reply = serve().post("/v1/placements", json=request_body())
    placement = Placement.model_validate_json(reply.content)
    assert reply.status_code == 200
    assert placement.id == PlacementRequest.model_validate(request_body()).content_hash()
    assert set(placement.layer_devices) == {"embed", "block.0", "block.1", "head"}


def test_layers_stay_are_copied_or_are_computed_on_the_hosts_cpu(serve):
    """``cuda:0`` has room for one layer and two buffers; a copy takes 1 ms, and the CPU 2 ms."""
    layers = [
        {"name": name, "forward_ms": {"gpu": 0.2, "cpu": 2.0}, "param_bytes": 500}
        for name in "abcde"
    ]
    edges = [{"source": a, "targets": [b], "bytes": 1} for a, b in itertools.pairwise("abcde")]
    rate = {"bandwidth_bytes_per_s": 5e5}
    devices = [
        {"name": "cuda:0", "type": "gpu", "memory_bytes": 1510, "from_host": rate},
        {"name": "cpu:0", "type": "cpu", "memory_bytes": 10_000},
    ]
    ends = [("cuda:0", "cpu:0"), ("cpu:0", "cuda:0")]
    links = [{"source": a, "target": b, "bandwidth_bytes_per_s": 1e6} for a, b in ends]
    body = {
        "profile": {"layers": layers, "edges": edges},
        "cluster": {"devices": devices, "links": links},
        "objective": "latency",
        "host_memory_bytes": 5000,
    }
    found = serve(default_solver).post("/v1/placements", json=body).json()
    assert found["status"] == "optimal"
    assert sorted(found["layer_devices"].values()) == ["cpu:0"] + ["cuda:0"] * 4
    assert list(found["resting"].values()) == ["host"] * 3


def test_what_a_profile_declares_of_batches_comes_back_with_the_placement(serve, request_body):
    body = request_body()
    declared = {
        "inputs": {"images": "items", "*": 1},
        "target": "items",
        "reduction": "sum",
        "outputs": {"loss": "sum"},
    }
    body["profile"]["batch_options"] = declared
    reply = serve(default_solver).post("/v1/placements", json=body).json()
    assert reply["batch_options"] == {**declared, "verify": True}
    body["profile"]["batch_options"] = declared | {"inputs": "rows"}
    refused = serve().post("/v1/placements", json=body)
    assert refused.status_code == 422
    assert "'rows' is not a rule" in refused.text and "batch_options" in refused.text


def test_a_solve_that_takes_longer_than_wait_is_202_with_a_location_that_answers_later(
    serve, solvers, request_body
):
    client = serve(solvers.until_stopped)
    reply = client.post("/v1/placements?wait=0", json=request_body())
    assert reply.status_code == 202
    assert reply.json()["status"] in ("queued", "running")
    assert client.get(reply.headers["Location"]).status_code == 202


@pytest.mark.parametrize(
    ("settings", "asked", "told"),
    [
        (
            {},
            {"time_limit_s": 86_400},
            "time_limit_s is 86400; this service allows at most 3600 (PLACER_MAX_TIME_LIMIT_S)",
        ),
        (
            {"max_time_limit_s": 5},
            {"time_limit_s": 5.5},
            "time_limit_s is 5.5; this service allows at most 5 ",
        ),
        (
            {"max_solver_workers": 4},
            {"workers": 5},
            "workers is 5; this service allows at most 4 (PLACER_MAX_SOLVER_",
        ),
        (
            {"max_solver_workers": 1},
            {"workers": 256, "time_limit_s": 86_400},
            "; workers is 256; this service allows",
        ),
    ],
)
def test_no_client_holds_a_worker_or_cores_longer_than_the_service_allows(
    serve, solvers, request_body, settings, asked, told
):
    # A client held a worker for a day.
    client = serve(solvers.until_stopped, **settings)
    body = request_body(**asked)
    reply = client.post("/v1/placements?wait=0", json=body)
    assert (reply.status_code, reply.json()["type"]) == (422, "urn:placer:problem:over-limit")
    assert told in reply.json()["detail"]
    assert {fault["pointer"] for fault in reply.json()["errors"]} == {f"#/{name}" for name in asked}
    batched = client.post(
        "/v1/placements:batch?wait=0", json={"shared": body, "requests": [{}]}
    ).json()["answers"]
    assert (batched[0]["status"], batched[0]["problem"]["detail"]) == (422, reply.json()["detail"])
    assert (
        client.get(
            f"/v1/placements/{PlacementRequest.model_validate(body).content_hash()}"
        ).status_code
        == 404
    )


def test_what_the_service_just_allows_is_solved(serve, request_body):
    client = serve(max_time_limit_s=5, max_solver_workers=4)
    assert (
        client.post("/v1/placements", json=request_body(time_limit_s=5, workers=4)).status_code
        == 200
    )


def test_an_answer_that_is_there_costs_no_solve_and_is_given_whatever_is_allowed(
    serve, request_body, tmp_path
):
    body = request_body(time_limit_s=60)
    first = serve(database=str(tmp_path / "p.db")).post("/v1/placements", json=body)
    stricter = serve(database=str(tmp_path / "p.db"), max_time_limit_s=1)
    assert stricter.post("/v1/placements", json=body).content == first.content


def test_a_job_that_was_accepted_under_looser_limits_is_stopped_at_those_of_now(
    start, request_body, tmp_path
):
    first = start("until_stopped")
    where = first.client.post("/v1/placements?wait=0", json=request_body(time_limit_s=50)).headers[
        "Location"
    ]
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    again = start("until_stopped", max_time_limit_s=0.2, overrun_s=0.1)
    assert again.client.get(where, params={"wait": 30}).json()["objective_value"] == 7.0


def test_a_running_solve_tells_its_incumbent_and_bound(serve, solvers, request_body, wait_until):
    client = serve(solvers.until_stopped)
    where = client.post("/v1/placements?wait=0", json=request_body()).headers["Location"]
    wait_until(lambda: client.get(where).json()["incumbent"] is not None)
    status = client.get(where).json()
    assert (status["incumbent"], status["bound"]) == (7.0, 3.0)


def test_delete_returns_the_best_so_far_and_keeps_it(serve, solvers, request_body, wait_until):
    client = serve(solvers.until_stopped)
    where = client.post("/v1/placements?wait=0", json=request_body()).headers["Location"]
    wait_until(lambda: client.get(where).json()["incumbent"] is not None)
    stopped = client.delete(where)
    assert stopped.status_code == 200
    assert stopped.json()["objective_value"] == 7.0
    assert client.get(where).json() == stopped.json()


def test_a_stopped_question_asked_again_is_solved_again(serve, solvers, request_body):
    client = serve(solvers.until_stopped)
    where = client.post("/v1/placements?wait=0", json=request_body()).headers["Location"]
    client.delete(where)
    assert client.post("/v1/placements?wait=0", json=request_body()).status_code == 202


def test_delete_of_a_queued_solve_answers_that_nothing_was_found(serve, solvers, request_body):
    client = serve(solvers.until_stopped)
    client.post("/v1/placements?wait=0", json=request_body(seed=1))
    where = client.post("/v1/placements?wait=0", json=request_body(seed=2)).headers["Location"]
    assert client.get(where).json()["status"] == "queued"
    assert client.delete(where).json()["status"] == "unknown"


def test_a_stop_that_finds_nothing_leaves_what_an_earlier_solve_found(
    serve, solvers, request_body, wait_until
):
    client = serve(solvers.until_stopped)
    where = client.post("/v1/placements?wait=0", json=request_body()).headers["Location"]
    wait_until(lambda: client.get(where).json()["incumbent"] is not None)
    found = client.delete(where).json()
    client.post("/v1/placements?wait=0", json=request_body(seed=1))
    assert client.post("/v1/placements?wait=0", json=request_body()).json()["status"] == "queued"
    assert client.delete(where).json() == client.get(where).json() == found
    assert client.get(f"{where}/request").status_code == 200


def test_a_solve_that_was_stopped_in_the_queue_has_its_status_in_the_history(
    serve, solvers, request_body
):
    client = serve(solvers.until_stopped)
    client.post("/v1/placements?wait=0", json=request_body(seed=1))
    where = client.post("/v1/placements?wait=0", json=request_body(seed=2)).headers["Location"]
    client.delete(where)
    (row,) = client.get("/v1/placements?status=unknown&objective=throughput").json()["placements"]
    assert (row["id"], row["status"]) == (where.rpartition("/")[2], "unknown")


def test_a_queued_solve_that_was_stopped_is_there_all_the_time(
    serve, solvers, request_body, tmp_path
):
    # Its end was told before it was written: who asked again meanwhile was told that there is no
    # such placement.
    client = serve(solvers.until_stopped, database=str(tmp_path / "p.db"))
    client.post("/v1/placements?wait=0", json=request_body(seed=1))
    where = client.post("/v1/placements?wait=0", json=request_body(seed=2)).headers["Location"]
    store = client.app.state.service.store
    real = store.put
    store.put = lambda *args, **kwargs: (time.sleep(0.2), real(*args, **kwargs))[1]
    with ThreadPoolExecutor(1) as other:
        stopping = other.submit(client.delete, where)
        statuses = set()
        while not stopping.done():
            statuses.add(client.get(where).status_code)
    assert client.get(where).json()["status"] == stopping.result().json()["status"] == "unknown"
    assert statuses <= {200, 202}


@pytest.mark.parametrize("method", ["put", "fail"])
@pytest.mark.parametrize("seed", [1, 2], ids=["running", "queued"])
def test_whoever_stops_a_solve_is_answered_whatever_goes_wrong_when_its_end_is_kept(
    serve, solvers, request_body, method, seed, service_log
):
    # A defect there ended the task that was to answer; the DELETE of a queued solve was waited for
    # without end.
    def broken(*_, **__):
        raise TypeError("a defect in the store")

    client = serve(solvers.until_stopped)
    for other in (1, 2):
        client.post("/v1/placements?wait=0", json=request_body(seed=other))
    store = client.app.state.service.store
    store.put = broken
    setattr(store, method, broken)
    where = (
        f"/v1/placements/{PlacementRequest.model_validate(request_body(seed=seed)).content_hash()}"
    )
    client.portal.call(client.app.state.service.solves.end_early, where.rpartition("/")[2])
    reply = client.get(where, params={"wait": 20})
    assert (reply.status_code, reply.json()["type"]) == (500, "urn:placer:problem:defect")
    assert client.get(where).content == reply.content
    assert "a defect in the store" in service_log.text


def test_the_same_request_is_answered_from_the_store(serve, request_body):
    client = serve()
    body = request_body(constraints={"pinned": {"head": "cuda:1", "embed": "cuda:0"}})
    for layer in body["profile"]["layers"]:
        layer["forward_ms"]["another type"] = 1.0
    first = client.post("/v1/placements", json=body)
    spelled_otherwise = json.dumps(backwards(body), indent=3)
    headers = {"Content-Type": "application/json"}
    assert (
        client.post("/v1/placements", content=spelled_otherwise, headers=headers).content
        == first.content
    )
    assert "placer_cache_hits_total 1.0" in client.get("/metrics").text


def test_the_same_request_while_it_is_solved_joins_that_solve(serve, solvers, request_body):
    client = serve(solvers.until_stopped, queue=0)
    first = client.post("/v1/placements?wait=0", json=request_body())
    second = client.post("/v1/placements?wait=0", json=request_body())
    assert (second.status_code, second.json()["id"]) == (202, first.json()["id"])


def test_a_feasible_answer_that_had_all_its_time_is_given_again(serve, solvers, request_body):
    client = serve(solvers.until_stopped, overrun_s=0)
    first = client.post("/v1/placements?wait=0", json=request_body(time_limit_s=0.2))
    client.get(first.headers["Location"], params={"wait": 30})
    assert (
        client.post("/v1/placements?wait=0", json=request_body(time_limit_s=0.2)).status_code == 200
    )


def test_an_answer_of_another_version_of_placer_is_made_anew(serve, request_body, monkeypatch):
    client = serve()
    client.post("/v1/placements", json=request_body())
    monkeypatch.setattr("placer.__version__", "another")
    client.post("/v1/placements", json=request_body())
    assert 'placer_solves_total{status="answered"} 2.0' in client.get("/metrics").text


def test_answers_outlive_the_service(serve, request_body, tmp_path):
    database = str(tmp_path / "new" / "placements.db")
    first = serve(database=database).post("/v1/placements", json=request_body())
    again = serve(database=database)
    assert again.get(f"/v1/placements/{first.json()['id']}").content == first.content
    assert again.post("/v1/placements", json=request_body()).content == first.content


def test_a_full_queue_is_429_with_retry_after(serve, solvers, request_body):
    client = serve(solvers.until_stopped, workers=1, queue=1)
    replies = [
        client.post("/v1/placements?wait=0", json=request_body(seed=seed)) for seed in range(3)
    ]
    assert [reply.status_code for reply in replies] == [202, 202, 429]
    assert 1 <= int(replies[2].headers["Retry-After"]) <= 30
    assert "placer_rejections_total 1.0" in client.get("/metrics").text


def test_a_queued_solve_runs_when_a_worker_is_free(serve, solvers, request_body, wait_until):
    client = serve(solvers.until_stopped)
    first = client.post("/v1/placements?wait=0", json=request_body(seed=1)).headers["Location"]
    second = client.post("/v1/placements?wait=0", json=request_body(seed=2)).headers["Location"]
    client.delete(first)
    wait_until(lambda: client.get(second).json()["status"] == "running")


def test_the_service_is_alive_ready_and_counts(serve):
    client = serve()
    assert client.get("/healthz").json()["status"] == "ok"
    assert client.get("/readyz").json()["status"] == "ready"
    assert (
        'placer_requests_total{method="GET",route="/healthz",status="200"} 1.0'
        in client.get("/metrics").text
    )


def test_two_applications_live_in_one_process(serve, request_body):
    one, other = serve(), serve()
    one.post("/v1/placements", json=request_body())
    assert 'placer_solves_total{status="answered"} 1.0' in one.get("/metrics").text
    assert 'placer_solves_total{status="answered"}' not in other.get("/metrics").text


@pytest.mark.parametrize("name", examples.requests())
def test_each_example_of_the_openapi_document_runs(serve, name):
    client = serve()
    operation = client.get("/openapi.json").json()["paths"]["/v1/placements"]["post"]
    value = operation["requestBody"]["content"]["application/json"]["examples"][name]["value"]
    assert client.post("/v1/placements", json=value).status_code == 200


def test_every_reference_of_the_openapi_document_resolves(service):
    document = service.get("/openapi.json").json()

    def references(node):
        if isinstance(node, dict):
            yield from ([node["$ref"]] if "$ref" in node else [])
            for child in node.values():
                yield from references(child)
        elif isinstance(node, list):
            for child in node:
                yield from references(child)

    found = set(references(document))
    assert "#/components/schemas/PlacementRequest" in found
    for reference in found:
        node = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
