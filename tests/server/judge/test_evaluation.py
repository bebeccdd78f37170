from __future__ import annotations

import json

import pytest

from placer.solver.solve import solve
from placer_server.openapi import examples

EVALUATE = "/v1/placements:evaluate"
COMPARE = "/v1/placements:compare"


@pytest.mark.parametrize(
    ("path", "made"), [(EVALUATE, examples.evaluations), (COMPARE, examples.comparisons)]
)
def test_each_example_of_the_openapi_document_is_judged(serve, path, made):
    client = serve()
    for example in made().values():
        reply = client.post(path, json=example["value"])
        assert reply.status_code == 200, reply.text


def test_a_map_is_judged_by_the_question_of_a_past_placement_and_against_its_answer(
    serve, request_body
):
    client = serve(solve)
    placed = client.post("/v1/placements", json=request_body()).json()
    own = client.post(
        f"{EVALUATE}?id={placed['id']}", json={"layer_devices": examples.own_map()}
    ).json()
    assert (own["valid"], own["best_id"], own["best_value"]) == (
        True,
        placed["id"],
        placed["objective_value"],
    )
    assert own["above_best"] == pytest.approx(
        own["objective_value"] / placed["objective_value"] - 1
    )
    same = client.post(
        f"{EVALUATE}?id={placed['id']}", json={"layer_devices": placed["layer_devices"]}
    ).json()
    assert (same["devices"], same["above_best"]) == (placed["devices"], 0.0)


def test_two_past_placements_are_compared_without_a_body(serve, request_body):
    client = serve(solve)
    ids = [
        client.post("/v1/placements", json=request_body(constraints=rules)).json()["id"]
        for rules in ({}, {"pinned": {"embed": "cuda:1"}})
    ]
    found = client.post(f"{COMPARE}?id={ids[0]}&id={ids[1]}").json()
    assert found["names"] == ids
    assert all(evaluation["valid"] for evaluation in found["evaluations"])


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (EVALUATE, {"layer_devices": {}, "reqest": {}}, 422, "did you mean 'request'?"),
        (EVALUATE, {"layer_devices": {}}, 422, "?id="),
        (EVALUATE, {"layer_devices": {"a": 5}}, 422, "layer_devices.a"),
        (COMPARE, {}, 422, "no request"),
        (f"{COMPARE}?id={'0' * 32}", {}, 404, "no placement"),
        (f"{EVALUATE}?id=x", {"layer_devices": {}}, 404, "not an id"),
    ],
)
def test_a_body_that_cannot_be_judged_is_a_problem_that_says_why(serve, path, body, status, words):
    reply = serve().post(path, json=body)
    assert (reply.status_code, reply.headers["Content-Type"]) == (
        status,
        "application/problem+json",
    )
    assert words in reply.json()["detail"]


def test_a_hostile_map_is_a_problem_of_at_most_4_kb(serve):
    client = serve()
    for body in (
        b"[" * 100_000,
        b"",
        b"\xff",
        json.dumps({"layer_devices": {"a" * 600_000: "b"}}).encode(),
    ):
        reply = client.post(EVALUATE, content=body, headers={"Content-Type": "application/json"})
        assert reply.status_code in (400, 422)
        assert len(reply.content) <= 4096
