from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from placer.schema import PlacementRequest
from placer_server.app import background
from placer_server.settings import Settings
from placer_server.workers.solving import SolveTask
from placer_server.workers.worker import Crashed, Killed, MemoryExceeded, Refused, Worker

KEY = "0" * 32


def worker(solver, body, limit_s=30.0, grace_s=1.0, report=lambda *_: None):
    return Worker(SolveTask(solver, KEY), body, report, limit_s=limit_s, grace_s=grace_s)


@pytest.fixture
def body(request_body):
    return json.dumps(request_body()).encode()


def test_each_solve_runs_in_a_process_of_its_own(serve, request_body):
    client = serve()
    methods = {
        client.post("/v1/placements", json=request_body(seed=seed)).json()["method"]
        for seed in range(3)
    }
    assert len(methods) == 3
    assert f"process {os.getpid()}" not in methods


def test_progress_is_reported_while_the_solver_runs(solvers, body):
    seen = []
    work = worker(
        solvers.until_stopped, body, report=lambda *values: (seen.append(values), work.stop())
    )
    assert b'"objective_value":7.0' in work.run().placement
    assert seen == [(7.0, 3.0)]


def test_a_worker_that_was_stopped_before_it_ran_hands_over_what_it_finds(solvers, body):
    work = worker(solvers.until_stopped, body, grace_s=20)
    work.stop()
    assert b'"objective_value":7.0' in work.run().placement


def test_a_solve_over_its_limit_is_stopped(solvers, body):
    assert (
        b'"objective_value":7.0'
        in worker(solvers.until_stopped, body, limit_s=0.1, grace_s=20).run().placement
    )


def test_a_solver_that_does_not_listen_is_killed(solvers, body):
    with pytest.raises(Killed, match=r"0\.1 s"):
        worker(solvers.deaf, body, limit_s=0.05, grace_s=0.1).run()


def test_a_solver_that_tells_without_a_pause_is_killed_too(solvers, body):
    # The deadline was looked at when nothing came; here more comes than is read.
    with pytest.raises(Killed):
        worker(
            solvers.talkative, body, limit_s=0.05, grace_s=0.1, report=lambda *_: time.sleep(0.001)
        ).run()


def test_a_solver_that_raises_is_a_crash_with_its_words(solvers, body, capfd):
    with pytest.raises(Crashed, match="a defect"):
        worker(solvers.failing, body).run()


def test_a_solver_that_dies_is_a_crash_that_names_the_signal(solvers, request_body):
    with pytest.raises(Crashed, match="SIGKILL"):
        worker(solvers.dying, json.dumps(request_body(seed=1)).encode()).run()


def test_an_input_error_of_the_solver_is_a_refusal(solvers, body):
    with pytest.raises(Refused, match="only the solver sees"):
        worker(solvers.refusing, body).run()


def test_a_payload_larger_than_a_pipe_arrives(solvers, body):
    assert b'"optimal"' in worker(solvers.quick, body + b" " * 3_000_000).run().placement


def test_a_crashed_worker_is_the_problem_of_its_job_alone(serve, solvers, request_body):
    client = serve(solvers.dying)
    crashed = client.post("/v1/placements", json=request_body(seed=1))
    assert (crashed.status_code, crashed.json()["type"]) == (
        500,
        "urn:placer:problem:solver-failed",
    )
    assert client.post("/v1/placements", json=request_body(seed=2)).status_code == 200
    assert client.get("/healthz").status_code == 200


def test_a_failed_solve_tells_its_problem_again_and_is_tried_again_when_asked(
    serve, solvers, request_body
):
    client = serve(solvers.failing)
    first = client.post("/v1/placements", json=request_body())
    assert len(first.content) <= 4096
    key = PlacementRequest.model_validate(request_body()).content_hash()
    assert client.get(f"/v1/placements/{key}").json() == first.json()
    client.post("/v1/placements", json=request_body())
    assert 'placer_solves_total{status="failed"} 2.0' in client.get("/metrics").text


def test_a_request_that_only_the_solver_can_refuse_is_422(serve, solvers, request_body):
    reply = serve(solvers.refusing).post("/v1/placements", json=request_body())
    assert reply.status_code == 422
    assert "only the solver sees" in reply.json()["detail"]


def test_delete_of_a_solver_that_does_not_listen_answers_that_nothing_was_found(
    serve, solvers, request_body
):
    client = serve(solvers.deaf, stop_grace_s=0.1)
    where = client.post("/v1/placements?wait=0", json=request_body()).headers["Location"]
    assert client.delete(where).json()["status"] == "unknown"


def test_a_solver_that_overran_its_time_and_was_killed_tells_the_setting_and_the_way_out(
    serve, solvers, request_body
):
    client = serve(solvers.deaf, overrun_s=0, stop_grace_s=0.1)
    reply = client.post("/v1/placements?wait=30", json=request_body(time_limit_s=0.1))
    assert (reply.status_code, reply.json()["type"]) == (500, "urn:placer:problem:solver-failed")
    assert "within 0.1 s and was killed" in reply.json()["detail"]
    assert (
        "coarser granularity" in reply.json()["detail"]
        and "PLACER_STOP_GRACE_S" in reply.json()["detail"]
    )


def test_leaving_the_service_ends_its_workers(serve, solvers, request_body):
    before = threading.active_count()
    client = serve(solvers.until_stopped)
    client.post("/v1/placements?wait=0", json=request_body())
    client.__exit__(None, None, None)
    assert threading.active_count() <= before
    client.__enter__()  # the fixture leaves it once more


def test_a_worker_ends_when_its_service_is_killed(tmp_path, solvers):
    script = tmp_path / "service.py"
    script.write_text(
        "import sys, json\n"
        f"sys.path.insert(0, {os.path.dirname(solvers.__file__)!r})\n"
        "import solvers_for_tests\n"
        "from placer_server.openapi import examples\n"
        "from placer_server.workers.solving import SolveTask\n"
        "from placer_server.workers.worker import Worker\n"
        "body = json.dumps(examples.requests()['throughput']['value']).encode()\n"
        "def report(*values): print('running', flush=True)\n"
        "Worker(SolveTask(solvers_for_tests.until_stopped, 'a'), body, report, limit_s=60, "
        "grace_s=1).run()\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"running\n"
    process.send_signal(signal.SIGKILL)
    # ends when no process holds the service's output any more; the solver takes 60 s
    process.communicate(timeout=20)


def test_a_service_whose_workers_may_take_too_little_is_not_ready_and_says_what_would_do(
    solvers, wait_until
):
    # It said that it was ready, and every solve was a 500.
    def readiness(memory_bytes):
        settings = Settings(
            port=0, database=":memory:", log_level="critical", worker_memory_bytes=memory_bytes
        )
        with background(settings, solver=solvers.quick) as url:
            wait_until(lambda: "first worker" not in httpx.get(f"{url}/readyz").text)
            return httpx.get(f"{url}/readyz")

    reply = readiness(60 * 2**20)
    told = re.search(
        r"PLACER_WORKER_MEMORY_BYTES is 62914560, .*: set (\d+) or more", reply.json()["detail"]
    )
    assert reply.status_code == 503 and told is not None
    assert readiness(int(told[1]) + 2**20).status_code == 200


def test_a_worker_that_has_no_room_to_begin_names_the_setting(solvers, body, capfd):
    small = Worker(
        SolveTask(solvers.quick, KEY),
        body,
        lambda *_: None,
        limit_s=30,
        grace_s=1,
        memory_bytes=8 * 2**20,
    )
    with pytest.raises(MemoryExceeded, match="PLACER_WORKER_MEMORY_BYTES"):
        small.run()


def test_a_solver_that_takes_more_memory_than_it_may_ends_alone_and_the_reason_names_the_setting(
    serve, solvers, request_body
):
    client = serve(solvers.greedy, worker_memory_bytes=2**30)
    reply = client.post("/v1/placements", json=request_body())
    assert (reply.status_code, reply.json()["type"]) == (500, "urn:placer:problem:solver-failed")
    assert "PLACER_WORKER_MEMORY_BYTES" in reply.json()["detail"]
    assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("limit_bytes", "words"), [(2**30, "PLACER_WORKER_MEMORY_BYTES"), (0, "than this machine has")]
)
def test_torchs_own_error_is_a_lack_of_memory(solvers, limit_bytes, words):
    task = solvers.torch_without_memory
    small = Worker(task, b"", limit_s=30, grace_s=1, memory_bytes=limit_bytes)
    with pytest.raises(MemoryExceeded, match=words):
        small.run()
