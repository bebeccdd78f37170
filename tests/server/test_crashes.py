"""Accepted requests are answered although services or workers are killed."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import httpx
import pytest
from accepted import accepted_jobs

from placer.schema import Placement, PlacementRequest
from placer.solver.check import check
from placer_server.store.store import Accepted, Answer, Store


def key_of(body):
    return PlacementRequest.model_validate(body).content_hash()


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_what_a_service_accepted_is_answered_by_its_next_start(start, request_body, sig):
    first = start("until_stopped")
    bodies = [request_body(seed=seed) for seed in range(3)]
    for body in bodies:
        assert first.client.post("/v1/placements?wait=0", json=body).status_code == 202
    assert first.end(sig) == (0 if sig == signal.SIGTERM else -sig)

    again = start("quick")
    replies = [again.client.get(f"/v1/placements/{key_of(body)}?wait=30") for body in bodies]
    assert [reply.json()["status"] for reply in replies] == ["optimal"] * 3
    assert again.end(signal.SIGTERM) == 0
    store = Store(again.database, keep=10)
    assert accepted_jobs(store) == []
    store.close()


def test_a_solve_that_waits_is_found_while_the_service_stops(
    serve, solvers, request_body, wait_until, tmp_path
):
    # It was forgotten before the connections were closed: who asked again on one was told that
    # there is none.
    client = serve(solvers.until_stopped, database=str(tmp_path / "p.db"), queue=2)
    running, waiting, stopped = (
        client.post("/v1/placements?wait=0", json=request_body(seed=seed)).headers["Location"]
        for seed in range(3)
    )
    wait_until(lambda: client.get(running).json()["incumbent"] is not None)
    client.portal.call(client.app.state.service.solves.stop_all)
    assert (client.get(waiting).status_code, client.get(waiting).json()["status"]) == (
        202,
        "queued",
    )
    assert client.get(f"{waiting}/events").text.startswith("event: handed-on")
    assert client.get(running, params={"wait": 30}).json()["objective_value"] == 7.0
    assert client.delete(stopped).json()["status"] == "unknown"
    store = client.app.state.service.store
    wait_until(
        lambda: [f"/v1/placements/{job.id}" for job in accepted_jobs(store)] == [running, waiting]
    )


def test_a_worker_that_is_killed_from_outside_costs_its_job_another_try_and_no_more(
    serve, solvers, request_body, wait_until
):
    client = serve(solvers.slow_start)
    where = client.post("/v1/placements?wait=0", json=request_body()).headers["Location"]
    wait_until(lambda: client.get(where).json()["incumbent"] is not None)
    # the solver gives its process as its value
    os.kill(int(client.get(where).json()["incumbent"]), signal.SIGKILL)
    reply = client.get(where, params={"wait": 30})
    assert (reply.status_code, reply.json()["status"]) == (200, "optimal")


def test_a_job_that_took_the_service_down_each_time_is_given_up_and_says_so(
    serve, request_body, tmp_path
):
    database, body = str(tmp_path / "p.db"), request_body()
    store = Store(database, keep=10)
    store.accept(
        Accepted(
            key_of(body),
            "",
            "throughput",
            1.0,
            httpx.Request("POST", "http://x", json=body).content,
        )
    )
    store.record_start(key_of(body), 3)
    store.close()
    reply = serve(database=database).get(f"/v1/placements/{key_of(body)}?wait=30")
    assert (reply.status_code, reply.json()["type"]) == (500, "urn:placer:problem:solver-failed")
    assert "started 3 times" in reply.json()["detail"]


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("deaf", "it did not stop within 0.1 s and was killed"),
        ("dying", "its process died (killed by SIGKILL)"),
        ("out of memory", "PLACER_WORKER_MEMORY_BYTES"),
    ],
)
def test_a_solve_whose_worker_was_killed_is_answered_with_the_best_that_it_had_told(
    serve, solvers, request_body, service_log, how, why
):
    # It was a 500, or, where it was stopped, said that nothing was found.
    client = serve(solvers.lost, overrun_s=1.0, stop_grace_s=0.1)
    body = request_body(time_limit_s=1, schedule="1f1b", break_ties=True)
    body["profile"]["model"] = how
    reply = client.post("/v1/placements?wait=60", json=body)
    request, placement = (
        PlacementRequest.model_validate(body),
        Placement.model_validate_json(reply.content),
    )
    assert (
        reply.status_code == 200
        and why in placement.method
        and "the best so far" in placement.method
    )
    check(request, placement)
    assert placement.layer_devices and why in service_log.text
    key = request.content_hash()
    assert client.get(f"/v1/placements/{key}").content == reply.content
    assert (
        PlacementRequest.model_validate_json(client.get(f"/v1/placements/{key}/request").content)
        == request
    )
    assert 'placer_solves_total{status="rescued"} 1.0' in client.get("/metrics").text


def test_delete_of_a_solver_that_does_not_listen_gives_the_best_that_it_had_told(
    serve, solvers, request_body, wait_until
):
    client = serve(solvers.lost, stop_grace_s=1.0)
    where = client.post("/v1/placements?wait=0", json=request_body()).headers["Location"]
    wait_until(lambda: client.get(where).json()["incumbent"] is not None)
    placement = Placement.model_validate_json(client.delete(where).content)
    assert placement.layer_devices and "within 1 s and was killed" in placement.method
    check(PlacementRequest.model_validate(request_body()), placement)


def test_what_a_killed_worker_told_and_is_not_so_is_no_answer(
    serve, solvers, request_body, service_log
):
    client = serve(solvers.lost)
    body = request_body(time_limit_s=1)
    body["profile"]["model"] = "out of memory, and wrong"
    reply = client.post("/v1/placements?wait=60", json=body)
    assert (reply.status_code, reply.json()["type"]) == (500, "urn:placer:problem:solver-failed")
    assert "objective_value" in service_log.text


def test_a_failure_is_told_after_a_restart_too(serve, solvers, request_body, tmp_path, capfd):
    database = str(tmp_path / "p.db")
    first = serve(solvers.failing, database=database)
    told = first.post("/v1/placements", json=request_body())
    again = serve(database=database)
    reply = again.get(f"/v1/placements/{key_of(request_body())}")
    assert (reply.status_code, reply.content) == (500, told.content)
    assert reply.headers["Content-Type"] == "application/problem+json"


def test_a_request_that_cannot_be_written_is_not_said_to_be_accepted(
    serve, solvers, request_body, monkeypatch
):
    def full(*_):
        raise OSError("no space left on device")

    client = serve(solvers.until_stopped)
    monkeypatch.setattr(client.app.state.service.store, "accept", full)
    reply = client.post("/v1/placements?wait=0", json=request_body())
    assert (reply.status_code, reply.json()["type"]) == (503, "urn:placer:problem:not-kept")


def test_a_second_service_on_a_database_leaves_the_first_ones_jobs_alone(
    serve, solvers, request_body, tmp_path
):
    database = str(tmp_path / "p.db")
    first = serve(solvers.until_stopped, database=database)
    where = first.post("/v1/placements?wait=0", json=request_body()).headers["Location"]
    second = serve(database=database)
    assert (
        second.get(where).status_code,
        second.get(where, params={"wait": 1}).json()["status"],
    ) == (202, "running")
    assert first.delete(where).json()["objective_value"] == 7.0


@pytest.mark.parametrize("seed", [0, 1], ids=["running", "queued"])
def test_a_question_asked_again_after_it_was_stopped_outlives_the_end_of_the_stopped_solve(
    serve, solvers, request_body, wait_until, tmp_path, seed
):
    # Both have one id, and so one row in the store, which the end of the first takes away.
    client = serve(solvers.until_stopped, database=str(tmp_path / "p.db"), queue=4)
    jobs, store = client.app.state.service.solves, client.app.state.service.store
    ending, asked_again = threading.Event(), threading.Event()
    real, body = store.put, request_body(seed=seed)

    def put(*args, **kwargs):
        ending.set()
        asked_again.wait(30)
        return real(*args, **kwargs)

    for first in range(2):
        client.post("/v1/placements?wait=0", json=request_body(seed=first))
    store.put = put
    with ThreadPoolExecutor(2) as others:
        stopping = others.submit(client.delete, f"/v1/placements/{key_of(body)}")
        assert ending.wait(30)
        asking = others.submit(client.post, "/v1/placements?wait=0", json=body)
        wait_until(lambda: (job := jobs.find(key_of(body))) is not None and not job.stopped)
        # where it is told to be accepted before the end of the first is written
        wait([asking], 0.2)
        asked_again.set()
        assert (stopping.result().status_code, asking.result().status_code) == (200, 202)
    assert key_of(body) in {job.id for job in accepted_jobs(store)}


def test_a_clock_that_jumps_back_costs_no_new_answer(tmp_path, monkeypatch):
    store = Store(str(tmp_path / "p.db"), keep=1)
    store.put("old", Answer(b"{}", True, "1"))
    monkeypatch.setattr("placer_server.store.store.time.time", lambda: 0.0)
    store.put("new", Answer(b"{}", True, "1"))
    store.close()
    again = Store(str(tmp_path / "p.db"), keep=1)
    assert (again.get("old"), again.get("new")) == (None, Answer(b"{}", True, "1"))
