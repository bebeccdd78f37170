"""Server-sent events over a real socket, since the test client does not stream."""

from __future__ import annotations

import json
import time

import broken_connections
import httpx
import pytest
from broken_connections import waiting_for_answer

from placer.schema import PlacementRequest
from placer_server.app import background
from placer_server.settings import Settings


@pytest.fixture
def url(tmp_path, solvers):
    settings = Settings(port=0, database=str(tmp_path / "p.db"), workers=1, log_level="error")
    with background(settings, solver=solvers.until_stopped) as url:
        yield url


def events(lines):
    """Yield the events of a stream as (kind, data)."""
    kind = ""
    for line in lines:
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))


def post(url, body, **parameters):
    return httpx.post(f"{url}/v1/placements", params={"wait": 0, **parameters}, json=body).json()[
        "id"
    ]


def until_incumbent(url, key):
    end = time.monotonic() + 30
    while httpx.get(f"{url}/v1/placements/{key}").json().get("incumbent") is None:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_stream_tells_incumbent_bound_and_gap_and_ends_with_the_placement(url, request_body):
    key, seen = post(url, request_body()), []
    with httpx.stream("GET", f"{url}/v1/placements/{key}/events", timeout=30) as reply:
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        for kind, data in events(reply.iter_lines()):
            seen.append(kind)
            if kind == "progress" and data["incumbent"] is not None:
                assert (data["incumbent"], data["bound"], data["gap"]) == (
                    7.0,
                    3.0,
                    pytest.approx(4 / 7),
                )
                httpx.delete(f"{url}/v1/placements/{key}")
    assert (seen[0], seen[-1], data["objective_value"]) == ("progress", "done", 7.0)


def test_the_stream_of_a_placement_that_is_there_is_its_end_alone(serve, request_body):
    client = serve()
    placed = client.post("/v1/placements", json=request_body()).json()
    lines = client.get(f"/v1/placements/{placed['id']}/events").text.splitlines()
    assert list(events(lines)) == [("done", placed)]


def test_the_stream_of_a_failed_solve_ends_with_its_problem(serve, solvers, request_body, capfd):
    client = serve(solvers.failing)
    problem = client.post("/v1/placements", json=request_body()).json()
    key = PlacementRequest.model_validate(request_body()).content_hash()
    assert list(events(client.get(f"/v1/placements/{key}/events").text.splitlines())) == [
        ("failed", problem)
    ]


def test_the_stream_of_what_nobody_asked_for_is_404(service):
    reply = service.get(f"/v1/placements/{'0' * 32}/events")
    assert (reply.status_code, reply.headers["Content-Type"]) == (404, "application/problem+json")


def leave_stream(url, key, on_disconnect):
    with httpx.stream(
        "GET", f"{url}/v1/placements/{key}/events?on_disconnect={on_disconnect}", timeout=30
    ) as reply:
        next(events(reply.iter_lines()))


def test_a_solve_ends_when_its_client_leaves_the_stream_and_said_so(url, request_body):
    key = post(url, request_body(), on_disconnect="stop")
    until_incumbent(url, key)
    leave_stream(url, key, "stop")
    assert (
        httpx.get(f"{url}/v1/placements/{key}?wait=30", timeout=40).json()["objective_value"] == 7.0
    )


def leave_while_solving(url, body, **parameters):
    """Wait for a placement, and break the connection once the solve runs; return its id."""
    key = PlacementRequest.model_validate(body).content_hash()
    query = httpx.QueryParams(wait=60, **parameters)
    with waiting_for_answer(broken_connections.post(f"{url}/v1/placements?{query}", body)):
        until_incumbent(url, key)
    return key


def test_a_solve_ends_when_the_client_that_waits_for_it_goes_away_and_said_so(url, request_body):
    key = leave_while_solving(url, request_body(), on_disconnect="stop")
    reply = httpx.get(f"{url}/v1/placements/{key}?wait=30", timeout=40)
    assert (reply.status_code, reply.json()["status"]) == (200, "feasible")


def test_a_solve_goes_on_when_its_client_leaves_without_a_word(url, request_body):
    key = leave_while_solving(url, request_body())
    assert httpx.get(f"{url}/v1/placements/{key}?wait=0.3", timeout=40).status_code == 202


def test_a_solve_that_somebody_else_wants_goes_on(url, request_body):
    key = post(url, request_body())  # wants it kept
    leave_stream(url, key, "stop")
    assert httpx.get(f"{url}/v1/placements/{key}?wait=0.3", timeout=40).status_code == 202


def test_a_stream_ends_when_the_service_stops_and_says_that_the_solve_goes_on(
    tmp_path, solvers, request_body
):
    settings = Settings(port=0, database=str(tmp_path / "p.db"), workers=1, log_level="error")
    with httpx.Client(timeout=30) as client:
        with background(settings, solver=solvers.until_stopped) as url:
            running, queued = (post(url, request_body(seed=seed)) for seed in range(2))
            until_incumbent(url, running)
            stream = client.stream("GET", f"{url}/v1/placements/{queued}/events")
            lines = stream.__enter__().iter_lines()
            assert next(events(lines))[0] == "progress"
        assert [kind for kind, _ in events(lines)][-1] == "handed-on"
        stream.__exit__(None, None, None)


def test_streams_are_bounded_and_one_that_is_left_makes_room(
    monkeypatch, solvers, request_body, wait_until
):
    monkeypatch.setattr("placer_server.app.MAX_STREAMS", 1)
    settings = Settings(port=0, database=":memory:", workers=1, log_level="error", stop_grace_s=5.0)
    with background(settings, solver=solvers.until_stopped) as url:
        path = f"{url}/v1/placements/{post(url, request_body())}/events"

        def status():
            with httpx.stream("GET", path, timeout=30) as reply:
                return reply.status_code

        with httpx.stream("GET", path, timeout=30) as first:
            lines = first.iter_lines()
            next(lines)
            refused = httpx.get(path)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "5")
        assert refused.headers["Content-Type"] == "application/problem+json"
        wait_until(lambda: status() == 200)
