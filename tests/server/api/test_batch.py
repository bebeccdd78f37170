"""Several questions in one request."""

from __future__ import annotations

import copy
import json

import pytest

from placer.schema import BatchAnswers, PlacementRequest
from placer.solver.solve import solve
from placer_server.app import default_solver
from placer_server.openapi import examples
from placer_server.web import validation

BATCH = "/v1/placements:batch"


def example():
    return copy.deepcopy(examples.batches()["three questions"]["value"])


def test_each_question_is_answered_as_it_is_alone(serve):
    client = serve(default_solver, queue=8)
    batch = example()
    reply = client.post(f"{BATCH}?wait=30", json=batch)
    answers = BatchAnswers.model_validate_json(reply.content).answers
    assert [answer.status for answer in answers] == [200] * 3
    for asked, answer in zip(batch["requests"], answers, strict=True):
        request = PlacementRequest.model_validate(batch["shared"] | asked)
        assert answer.id == request.content_hash()
        assert answer.placement.objective_value == pytest.approx(solve(request).objective_value)
        assert client.get(f"/v1/placements/{answer.id}").json() == answer.placement.model_dump(
            mode="json"
        )


def test_what_is_stored_is_not_solved_again(serve):
    client = serve(queue=8)
    first = client.post(f"{BATCH}?wait=30", json=example())
    assert client.post(BATCH, json=example()).json() == first.json()
    assert "placer_cache_hits_total 3.0" in client.get("/metrics").text


def test_the_same_question_twice_in_a_batch_is_one_solve(serve):
    client = serve(queue=8)
    answers = client.post(f"{BATCH}?wait=30", json=example() | {"requests": [{}, {}]}).json()[
        "answers"
    ]
    assert answers[0] == answers[1]
    assert 'placer_solves_total{status="answered"} 1.0' in client.get("/metrics").text


def test_a_fault_of_one_is_its_own_answer(serve):
    client = serve(queue=8)
    batch = example()
    batch["requests"][1] = {"objectiv": "latency"}
    answers = client.post(f"{BATCH}?wait=30", json=batch).json()["answers"]
    assert [answer["status"] for answer in answers] == [200, 422, 200]
    assert "did you mean 'objective'?" in answers[1]["problem"]["detail"]


def test_what_the_queue_has_no_room_for_says_when_to_ask_again(serve, solvers):
    client = serve(solvers.until_stopped, workers=1, queue=1, client_share=1.0)
    answers = client.post(f"{BATCH}?wait=0", json=example()).json()["answers"]
    assert [answer["status"] for answer in answers] == [202, 202, 429]
    assert [answer["progress"]["status"] for answer in answers[:2]] == ["running", "queued"]
    assert answers[2]["retry_after_s"] >= 1
    for answer in answers[:2]:
        assert client.delete(f"/v1/placements/{answer['id']}").status_code == 200


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"requests": []}, "requests: Tuple should"),
        ({"requests": [{}] * 65}, "requests"),
        ({"requests": [5]}, "requests.0"),
        ({"request": [{}]}, "did you mean 'requests'?"),
        ({}, "requests: is missing"),
    ],
)
def test_a_batch_that_is_none_is_told(service, content, words):
    reply = service.post(BATCH, json=content)
    assert (reply.status_code, reply.headers["Content-Type"]) == (422, "application/problem+json")
    assert words.replace("Tuple should", "") in reply.json()["detail"]


def test_what_is_shared_cannot_be_multiplied_beyond_a_limit(serve, monkeypatch):
    batch = example() | {"requests": [{}] * 64}
    one = len(json.dumps(batch["shared"]))
    monkeypatch.setattr(validation, "MAX_EXPANDED_BYTES", 63 * one)
    reply = serve().post(BATCH, json=batch)
    assert (reply.status_code, reply.json()["type"]) == (413, "urn:placer:problem:batch-too-large")


@pytest.mark.parametrize("seed", ["1e999", "-1", "9" * 300, "NaN", "[" * 200 + "]" * 200])
def test_a_hostile_number_or_nesting_is_no_5xx(service, seed):
    text = json.dumps(example() | {"requests": [{"seed": 0}]}).replace(
        '"seed": 0', f'"seed": {seed}'
    )
    reply = service.post(BATCH, content=text, headers={"Content-Type": "application/json"})
    statuses = (
        [reply.status_code] if reply.status_code != 200 else [reply.json()["answers"][0]["status"]]
    )
    assert statuses[0] in (400, 422)
    assert len(reply.content) <= 8192
