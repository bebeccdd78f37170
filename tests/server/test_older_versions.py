"""Requests and a database of schema version 1."""

from __future__ import annotations

import copy
import json
import sqlite3
from pathlib import Path

import pytest

from placer.schema import SCHEMA_VERSION, Batch, Placement, PlacementRequest, Profile
from placer_server.workers.solving import default_solver

FILES = Path(__file__).parents[1] / "placer" / "schema" / "version_1"
ANSWERED = "ca59fb13de09a785c426a978dca7d43f"
"""The id of the placement in the database, whose request is ``request.json``."""
WAITING = "af6011743d5a2c8145d404ccbc3fe713"
"""The id of the accepted request in the database."""
OLD_NAMES = (b'"short_bytes"', b'"steps"', b'"ties"', b'"helps"', b'"weights_ms"', b'"rest_bytes"')


def old(name):
    return json.loads((FILES / f"{name}.json").read_text())


@pytest.fixture
def database(tmp_path):
    """Return a database that version 1 wrote: answers, a profile, a node and a waiting request."""
    connection = sqlite3.connect(tmp_path / "p.db")
    connection.executescript((FILES / "database.sql").read_text())
    connection.close()
    return str(tmp_path / "p.db")


def current(reply, kind):
    """Return what a reply holds, which must be of the current version."""
    assert reply.status_code == 200, reply.text
    assert reply.json()["schema_version"] == SCHEMA_VERSION
    assert not [name for name in OLD_NAMES if name in reply.content]
    return kind.model_validate_json(reply.content)


def test_a_request_of_version_1_is_answered(serve):
    body = old("request") | {"explain": False}
    reply = serve(default_solver).post("/v1/placements?wait=60", json=body)
    found = current(reply, Placement)
    assert found.step is not None and found.step.kind == "steady-state"
    assert found.objective_value == pytest.approx(old("placement")["objective_value"])
    assert found.id == PlacementRequest.model_validate(body).content_hash()


@pytest.mark.parametrize("version", ["1", "2", "3", None])
def test_a_profile_of_version_1_is_answered_in_a_request_of_any_version(serve, version):
    body = {"profile": old("profile"), "schema_version": version}
    if version is None:
        del body["schema_version"]
    client = serve()
    placement = current(client.post("/v1/placements?wait=60", json=body), Placement)
    asked = current(client.get(f"/v1/placements/{placement.id}/request"), PlacementRequest)
    assert asked.profile == Profile.model_validate(old("profile"))


def test_requests_of_version_1_are_answered_in_a_batch(serve):
    reply = serve(default_solver, queue=4).post("/v1/placements:batch?wait=60", json=old("batch"))
    answers = [Placement.model_validate(one["placement"]) for one in reply.json()["answers"]]
    assert [one.step.kind for one in answers if one.step] == ["isolated", "steady-state"]
    assert len(Batch.model_validate(old("batch")).requests) == len(answers)


def test_maps_are_evaluated_for_a_request_of_version_1(service):
    request, placement = old("request"), old("placement")
    body = {"request": request, "layer_devices": placement["layer_devices"]}
    reply = service.post("/v1/placements:evaluate", json=body)
    assert reply.json()["objective_value"] == pytest.approx(placement["objective_value"])
    maps = {name: placement["layer_devices"] for name in "ab"}
    reply = service.post("/v1/placements:compare", json={"request": request, "maps": maps})
    assert reply.json()["moves"] == []


def test_a_node_of_version_1_is_registered(serve):
    client = serve()
    assert client.put("/v1/nodes/one", json=old("cluster")).status_code == 200
    links = client.get("/v1/cluster?node=one").json()["links"]
    assert links[0]["bidirectional"] == old("cluster")["links"][0]["both_ways"]


def test_a_fault_in_a_request_of_version_1_is_told_at_its_place(service):
    body = copy.deepcopy(old("request"))
    body["profile"]["layers"][0]["weights_ms"] = {"t": -1}
    reply = service.post("/v1/placements", json=body)
    assert reply.status_code == 422
    (fault,) = reply.json()["errors"]
    assert fault["pointer"] == "#/profile/layers/0/weight_grad_ms/t"


def test_a_database_of_version_1_answers_under_its_ids(serve, database):
    client = serve(database=database)
    placement = current(client.get(f"/v1/placements/{ANSWERED}"), Placement)
    assert placement == Placement.model_validate(old("placement")).model_copy(
        update={"solve_time_s": placement.solve_time_s, "method": placement.method}
    )
    request = current(client.get(f"/v1/placements/{ANSWERED}/request"), PlacementRequest)
    assert request == PlacementRequest.model_validate(old("request"))
    listed = client.get("/v1/placements").json()["placements"]
    (profile_id,) = [one["profile_id"] for one in listed if one["id"] == ANSWERED]
    assert current(client.get(f"/v1/profiles/{profile_id}"), Profile) == request.profile
    assert current(client.get(f"/v1/profiles/{'0' * 32}"), Profile) == Profile.model_validate(
        old("profile")
    )
    links = client.get("/v1/cluster?node=one").json()["links"]
    assert links[0]["bidirectional"] is not None


def test_a_placement_of_a_database_of_version_1_is_shown_and_evaluated(serve, database):
    client = serve(database=database)
    shown = client.get(f"/v1/placements/{ANSWERED}/timeline").json()
    assert (shown["id"], shown["schema_version"]) == (ANSWERED, SCHEMA_VERSION)
    assert client.get(f"/v1/placements/{ANSWERED}/report").status_code == 200
    reply = client.post(
        f"/v1/placements:evaluate?id={ANSWERED}",
        json={"layer_devices": old("placement")["layer_devices"]},
    )
    assert reply.json()["best_id"] == ANSWERED


def test_an_accepted_request_of_version_1_is_answered_under_its_id(serve, database):
    client = serve(default_solver, database=database)
    placement = current(client.get(f"/v1/placements/{WAITING}?wait=60"), Placement)
    assert placement.id == WAITING
    assert placement.step is not None and placement.step.kind == "isolated"
