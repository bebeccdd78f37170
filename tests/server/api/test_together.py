"""Placements of several models that are used one after another, in one request."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
from fastapi.testclient import TestClient
from joint_requests import random_request

from placer.schema import JointPlacement, JointRequest, Placement
from placer.solver.together import solve_together
from placer_server.app import default_solver
from placer_server.openapi import examples

TOGETHER = "/v1/placements:together"


def body(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(examples.joint_requests()["pipeline"]["value"]), **changes}


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_the_answer_is_the_one_of_this_process(serve: Any, seed: int | None) -> None:
    request = JointRequest.model_validate(body()) if seed is None else random_request(seed)
    reply = serve(default_solver).post(f"{TOGETHER}?wait=60", json=request.model_dump(mode="json"))
    assert reply.status_code == 200, reply.text
    found, here = JointPlacement.model_validate_json(reply.content), solve_together(request)
    if here.joint.status == "infeasible":
        assert found.joint.infeasible == here.joint.infeasible and not found.placements
        return
    assert found.request_ms == pytest.approx(here.request_ms)
    assert found.runs == here.runs and list(found.placements) == list(request.models)
    total = sum(
        found.runs[name] * (one.objective_value or 0.0) for name, one in found.placements.items()
    )
    assert found.request_ms == pytest.approx(total)


def test_the_joint_placement_is_a_placement_like_any_other(serve: Any) -> None:
    client = serve(default_solver)
    first = JointPlacement.model_validate_json(
        client.post(f"{TOGETHER}?wait=60", json=body()).content
    )
    key = JointRequest.model_validate(body()).placement_request().content_hash()
    assert first.joint.id == key
    stored = Placement.model_validate_json(client.get(f"/v1/placements/{key}").content)
    assert stored == first.joint
    for shown in ("report", "timeline", "request"):
        assert client.get(f"/v1/placements/{key}/{shown}").status_code == 200
    second = client.post(TOGETHER, json=body()).content
    assert JointPlacement.model_validate_json(second) == first
    assert "placer_cache_hits_total 1.0" in client.get("/metrics").text


def test_a_solve_that_takes_longer_than_wait_is_202_and_can_be_followed(
    serve: Any, solvers: Any
) -> None:
    client = serve(solvers.until_stopped)
    reply = client.post(f"{TOGETHER}?wait=0", json=body())
    assert reply.status_code == 202
    where = reply.headers["Location"]
    assert client.get(where).status_code == 202
    again = client.post(f"{TOGETHER}?wait=0", json=body())
    assert again.json()["id"] == reply.json()["id"]
    assert client.delete(where).status_code == 200


def test_a_job_that_is_stopped_before_it_starts_has_no_placements(
    serve: Any, solvers: Any, request_body: Any, wait_until: Any
) -> None:
    client = serve(solvers.until_stopped)
    running = client.post("/v1/placements?wait=0", json=request_body()).json()["id"]
    replies = []
    waiting = threading.Thread(
        target=lambda: replies.append(client.post(f"{TOGETHER}?wait=60", json=body()))
    )
    waiting.start()
    key = JointRequest.model_validate(body()).placement_request().content_hash()
    wait_until(lambda: client.get(f"/v1/placements/{key}").status_code == 202)
    client.delete(f"/v1/placements/{key}")
    waiting.join()
    found = JointPlacement.model_validate_json(replies[0].content)
    assert (found.joint.status, found.placements) == ("unknown", {})
    assert found.runs == {"encoder": 1, "unet": 50}
    client.delete(f"/v1/placements/{running}")


def test_models_that_do_not_fit_are_an_answer_with_the_reason(serve: Any) -> None:
    content = body()
    for model in content["models"].values():
        for device in model["profile"]["cluster"]["devices"]:
            device["memory_bytes"] = 2**32
    reply = serve(default_solver).post(f"{TOGETHER}?wait=60", json=content)
    found = JointPlacement.model_validate_json(reply.content)
    assert (reply.status_code, found.joint.status) == (200, "infeasible")
    assert found.joint.infeasible is not None and "short" in found.joint.infeasible.text


def test_a_large_request_is_checked_in_another_process(serve: Any) -> None:
    content = body()
    for model in content["models"].values():
        for layer in model["profile"]["layers"]:
            layer["module"] = "M" * 500
        model["profile"]["versions"] = {f"{number}": "v" * 500 for number in range(300)}
    reply = serve(default_solver).post(f"{TOGETHER}?wait=60", json=content)
    assert len(reply.request.content) > 192 * 1024 and reply.status_code == 200, reply.text


def _changed(path: str, value: Any) -> dict[str, Any]:
    """Return the example with the field at a path changed, or left out if the value is None."""
    content = body()
    *folders, name = path.split(".")
    inner = content
    for folder in folders:
        inner = inner[folder]
    if value is None:
        del inner[name]
    else:
        inner[name] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("models.unet.profile", None, "models.unet.profile: is missing"),
        ("models.unet.profile.cluster", None, "the profile of 'unet' has no cluster"),
        ("models.unet.profile.cluster.devices", [], "models.unet.profile.cluster.devices"),
        ("models.unet.runs", 0, "models.unet.runs"),
        ("models.unet.runs", "50", "models.unet.runs"),
        ("models", {}, "models"),
        ("models", None, "models: is missing"),
        ("models.a/b", body()["models"]["unet"], "has a '/'"),
        ("time_limits", 3, "did you mean 'time_limit_s'?"),
        ("objective", "latency", "objective: there is no such field"),
        ("constraints", {"contiguous": True}, "constraints.contiguous is True"),
        ("constraints", {"pinned": {"unet/mi": "cuda:0"}}, "did you mean 'unet/mid'?"),
        ("constraints", {"pinned": {"mid": "cuda:0"}}, "there is no layer 'mid'"),
        ("constraints", {"min_devices": 3}, "min_devices is 3, but the cluster has 2 devices"),
        ("time_limit_s", 86_400, "PLACER_MAX_TIME_LIMIT_S"),
        ("schema_version", "9", "version '9' is not known here"),
    ],
)
def test_a_wrong_request_is_refused_with_the_reason(
    service: TestClient, path: str, value: Any, words: str
) -> None:
    reply = service.post(TOGETHER, json=_changed(path, value))
    assert (reply.status_code, reply.headers["Content-Type"]) == (422, "application/problem+json")
    assert words in reply.json()["detail"]


def test_profiles_of_other_devices_are_refused(service: TestClient) -> None:
    content = body()
    cluster = content["models"]["unet"]["profile"]["cluster"]
    cluster["devices"], cluster["links"] = cluster["devices"][:1], []
    reply = service.post(TOGETHER, json=content)
    assert reply.status_code == 422
    assert "measure all models on the same devices" in reply.json()["detail"]


def test_times_that_become_too_long_with_the_runs_are_refused(serve: Any) -> None:
    content = body()
    content["models"]["unet"]["profile"]["layers"][0]["forward_ms"]["gpu"] = 9e8
    reply = serve().post(TOGETHER, json=content)
    assert reply.status_code == 422
    assert "layer 'conv_in' of 'unet' has a forward_ms of 9e+08 and runs 50 times" in reply.text


def test_a_profile_alone_is_told_its_place(service: TestClient) -> None:
    reply = service.post(TOGETHER, json=body()["models"]["unet"]["profile"])
    assert reply.status_code == 422 and reply.json()["errors"]


def test_queue_and_parameters_are_those_of_other_placements(
    serve: Any, solvers: Any, request_body: Any
) -> None:
    client = serve(solvers.until_stopped, workers=1, queue=1, client_share=1.0)
    ids = [
        client.post("/v1/placements?wait=0", json=request_body(seed=seed)).json()["id"]
        for seed in (1, 2)
    ]
    reply = client.post(f"{TOGETHER}?wait=0", json=body())
    assert reply.status_code == 429 and int(reply.headers["Retry-After"]) >= 1
    assert client.post(f"{TOGETHER}?waits=0", json=body()).status_code == 422
    headers = {"Content-Type": "application/json"}
    assert client.post(TOGETHER, content=b"{", headers=headers).status_code == 400
    for key in ids:
        client.delete(f"/v1/placements/{key}")
