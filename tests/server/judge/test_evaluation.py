from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack

import pytest
from replicas_by_stage import two_to_one

from placer.schema import PlacementRequest
from placer.solver.solve import solve
from placer_server.jobs.evaluations import BEST_AT_ONCE, MAX_BEST_WAITING, Evaluations
from placer_server.judge.evaluation import EvaluationInput, evaluate_task
from placer_server.openapi import examples
from placer_server.problem import Problem
from placer_server.settings import Settings

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


def test_copies_of_the_model_are_judged_and_compared_with_the_best_shape(serve, request_body):
    client = serve(solve)
    together = {"colocated": [list(examples.own_map())]}
    asked = request_body(objective="step", chunks=2, replicas="auto", constraints=together)
    placed = client.post("/v1/placements?wait=20", json=asked).json()
    assert [len(members) for members in placed["replicas"].values()] == [2]
    alone = dict.fromkeys(placed["layer_devices"], "cuda:0")
    found = client.post(f"{COMPARE}?id={placed['id']}", json={"maps": {"alone": alone}}).json()
    assert [one["valid"] for one in found["evaluations"]] == [True, True]
    assert found["best"] == placed["id"]
    names = {"layer_devices": placed["layer_devices"], "replicas": placed["replicas"]}
    same = client.post(f"{EVALUATE}?id={placed['id']}", json=names).json()
    assert (same["devices"], same["above_best"]) == (placed["devices"], 0.0)
    one_sided = {**names, "replicas": {"cuda:1": placed["replicas"]["cuda:0"]}}
    refused = client.post(f"{EVALUATE}?id={placed['id']}", json=one_sided)
    assert (refused.status_code, "the map has layers on" in refused.json()["detail"]) == (422, True)


def test_replicas_by_stage_are_judged_compared_and_shown(serve, request_body):
    client = serve(solve)
    body = two_to_one(request_body())
    names = ["cuda:0", "cuda:1", "cuda:2"]
    placed = client.post("/v1/placements?wait=20", json=body).json()
    assert [len(members) for members in placed["replicas"].values()] == [2]
    key = placed["id"]
    given = {"layer_devices": placed["layer_devices"], "replicas": placed["replicas"]}
    found = client.post(f"{EVALUATE}?id={key}&best=true", json=given).json()
    assert (found["valid"], found["devices"], found["above_best"]) == (True, placed["devices"], 0.0)
    maps = {"maps": {"own": placed["layer_devices"]}, "replicas": {"own": placed["replicas"]}}
    compared = client.post(f"{COMPARE}?id={key}", json=maps).json()
    assert [one["objective_value"] for one in compared["evaluations"]] == [
        placed["objective_value"]
    ] * 2
    shown = client.get(f"/v1/placements/{key}/timeline").json()
    assert [one["device"] for one in shown["devices"]] == names
    assert shown["step_ms"] == pytest.approx(placed["step"]["isolated_ms"])
    trace = client.get(f"/v1/placements/{key}/trace").json()["traceEvents"]
    slices = {one["tid"] for one in trace if one["ph"] == "X"}
    assert len(slices) >= len(names)
    report = client.get(f"/v1/placements/{key}/report").text
    assert "cuda:0, cuda:1</td>" in report
    refused = client.post(f"{COMPARE}?id={key}", json={**maps, "replicas": {"other": {}}})
    assert refused.status_code == 422
    assert "are given for 'other', which is not a map" in refused.text


def test_a_text_of_an_engine_is_judged_against_the_best_that_its_format_can_express(
    service, request_body
):
    body = {"request": request_body(), "format": "vllm", "text": "2"}
    found = service.post(f"{EVALUATE}?best=true", json=body).json()
    # one block a device, as even as the example is
    assert found["best"]["export"]["text"] == "1,1"
    assert found["best"]["speedup"] == found["objective_value"] / found["best_value"] > 1


def test_a_past_placement_that_answers_the_same_request_is_the_best_without_a_solve(
    serve, request_body
):
    client = serve(solve)
    placed = client.post("/v1/placements", json=request_body(for_format="vllm")).json()
    found = client.post(
        f"{EVALUATE}?id={placed['id']}&best=true", json={"format": "vllm", "text": "2"}
    ).json()
    assert found["best"]["placement"] == placed
    assert found["best"]["export"]["text"] == "1,1"


def test_the_service_limits_the_solve_for_the_best_placement(serve, request_body):
    client = serve(max_time_limit_s=1e-6)
    body = {"request": request_body(time_limit_s=600), "layer_devices": examples.own_map()}
    found = client.post(f"{EVALUATE}?best=true", json=body).json()
    request = PlacementRequest.model_validate(body["request"] | {"time_limit_s": 1e-6})
    assert found["best_id"] == request.content_hash()


def test_only_a_few_evaluations_may_wait_for_a_best_placement():
    async def refused() -> tuple[int, str]:
        evaluations = Evaluations(Settings(database=":memory:", client_share=1.0))
        given = EvaluationInput(b"", (), evaluations.best_limits)
        with ExitStack() as held:
            for _ in range(BEST_AT_ONCE + MAX_BEST_WAITING):
                held.enter_context(evaluations._best_lane.quota.held("client"))
            with pytest.raises(Problem) as problem:
                await evaluations.run(evaluate_task, given, "client")
        return problem.value.status, problem.value.headers["Retry-After"]

    assert asyncio.run(refused()) == (429, "10")


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (EVALUATE, {"text": "1,1", "layer_devices": {}}, 422, "given together with text"),
        (EVALUATE, {}, 422, "layer_devices: is missing; give the device of each layer, or a text"),
        (EVALUATE, {"format": "vlm", "text": "1"}, 422, "format"),
        (f"{EVALUATE}?best=maybe", {"layer_devices": {}}, 422, "best"),
        (EVALUATE, {"layer_devices": {}, "reqest": {}}, 422, "did you mean 'request'?"),
        (EVALUATE, {"layer_devices": {}}, 422, "?id="),
        (EVALUATE, {"layer_devices": {"a": 5}}, 422, "layer_devices.a"),
        (COMPARE, {}, 422, "no request"),
        (f"{COMPARE}?id={'0' * 32}", {}, 404, "no placement"),
        (f"{EVALUATE}?id=x", {"layer_devices": {}}, 404, "not an id"),
    ],
)
def test_a_body_that_cannot_be_judged_is_a_problem_that_says_why(
    service, path, body, status, words
):
    reply = service.post(path, json=body)
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
