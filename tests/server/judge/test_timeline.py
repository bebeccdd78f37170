"""Timelines against closed forms, the trace and the report."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from rows import row

from placer.errors import InputError
from placer.schema import Placement, PlacementRequest, Timeline
from placer_server.app import default_solver
from placer_server.judge.timeline import MAX_PASSES, timeline
from placer_server.openapi import examples

WAYS = ("forward_ms", "backward_ms")
HALVES = {"embed": "cuda:0", "block.0": "cuda:0", "block.1": "cuda:1", "head": "cuda:1"}


def example(**changes):
    """Return two halves with 2.5 ms forward and 5 ms backward, and free transfers by default."""
    body = examples.requests()["throughput"]["value"]
    for edge in body["profile"]["edges"]:
        # of no bytes there would be no gradient to wait for
        edge["bytes"], edge["gradient_bytes"] = 0, 1
    for link in body["cluster"]["links"]:
        link["latency_s"], link["bandwidth_bytes_per_s"] = 0, 1e15
    return PlacementRequest.model_validate({**body, **changes})


def placed(where=HALVES, **changes):
    return Placement(status="feasible", objective="throughput", layer_devices=where, **changes)


@pytest.mark.parametrize("order", ["1f1b", "fill-drain"])
def test_two_equal_stages_take_one_micro_batch_more_than_they_are(order):
    shown = timeline(example(chunks=4, schedule=order), placed(schedule=order))
    assert shown.step_ms == pytest.approx((4 + 2 - 1) * 7.5)
    assert shown.bubble == pytest.approx(1 / 5)
    assert {spent.device: spent.busy_ms for spent in shown.devices} == pytest.approx(
        {"cuda:0": 30, "cuda:1": 30}
    )
    assert len(shown.passes) == 2 * 2 * 4
    assert next((p.start_ms, p.end_ms) for p in shown.passes if p.device == "cuda:1") == (2.5, 5.0)


def test_inference_has_forward_passes_alone():
    shown = timeline(example(chunks=3, training=False), placed())
    assert {p.phase for p in shown.passes} == {"forward"}
    assert shown.step_ms == pytest.approx((3 + 2 - 1) * 2.5)


def test_of_replicas_the_first_pipeline_is_shown_with_its_exchange():
    request = row(
        [1.0] * 4,
        devices=4,
        chunks=8,
        schedule="1f1b",
        grad_bytes=100_000_000,
        memory_bytes=410_000_000,
        optimizer_ms=0.5,
        step_kind="isolated",
        replicas="auto",
    )
    placement = default_solver(request)
    assert len(placement.replicas) == 2
    shown = timeline(request, placement)
    assert [spent.device for spent in shown.devices] == list(placement.stages)
    assert shown.step_ms == pytest.approx(placement.objective_value)
    assert len(shown.passes) == 2 * 2 * placement.chunks


def test_units_of_a_size_that_was_not_measured_are_refused():
    shared = tuple({"device": name, "samples": 1} for name in ("cuda:1", "cuda:2"))
    placement = Placement.model_validate(
        {**placed().model_dump(), "batch_size": 2, "replicas": {"cuda:1": shared}}
    )
    with pytest.raises(InputError, match=r"of 2 samples under '1f1b', which its request does not"):
        timeline(example(), placement)


def test_one_device_has_no_bubble():
    shown = timeline(example(chunks=3), placed(dict.fromkeys(HALVES, "cuda:0")))
    assert (shown.step_ms, shown.bubble, shown.copies) == (pytest.approx(45), 0, ())


def test_a_transfer_takes_latency_and_bytes_over_bandwidth():
    request = PlacementRequest.model_validate(examples.requests()["throughput"]["value"])
    shown = timeline(request, placed())
    took_ms = 1e3 * (1e-5 + 2**24 / 2e11)
    assert {copy.carries for copy in shown.copies} == {"values", "gradients"}
    for copy in shown.copies:
        assert copy.end_ms - copy.start_ms == pytest.approx(took_ms)


def test_a_map_that_is_left_and_come_back_to_is_shown_by_its_segments():
    where = {"embed": "cuda:0", "block.0": "cuda:1", "block.1": "cuda:0", "head": "cuda:1"}
    shown = timeline(example(chunks=2), placed(where))
    assert {p.stage for p in shown.passes} == {0, 1, 2, 3}
    for device in ("cuda:0", "cuda:1"):
        mine = [p for p in shown.passes if p.device == device]
        assert all(one.end_ms <= other.start_ms + 1e-9 for one, other in itertools.pairwise(mine))


def test_the_order_that_memory_has_room_for_is_the_one_that_is_shown():
    where = {"embed": "cuda:0", "block.0": "cuda:1", "block.1": "cuda:1", "head": "cuda:0"}
    request = example(
        objective="step", chunks=6, schedule="interleaved", constraints={"pinned": where}
    )
    times = zip(
        request.profile.layers, [(1.0, 8.0), (4.0, 8.0), (4.0, 8.0), (10.0, 20.0)], strict=True
    )
    layers = [
        layer.model_copy(
            update={
                way: dict.fromkeys(layer.forward_ms, time)
                for way, time in zip(WAYS, both, strict=True)
            }
        )
        for layer, both in times
    ]
    profile = request.profile.model_copy(update={"layers": tuple(layers)})
    asked = request.model_copy(update={"profile": profile})
    placement = default_solver(asked)
    # where memory is short, 3, 2 and 1
    assert placement.step.in_flight == (6, 6, 6)
    shown = timeline(asked, placement)
    assert shown.step_ms == pytest.approx(placement.step.isolated_ms - placement.step.optimizer_ms)


def test_of_a_million_micro_batches_the_first_are_shown():
    shown = timeline(example(chunks=1_000_000), placed())
    assert shown.chunks == 1_000_000
    assert len(shown.passes) <= MAX_PASSES
    assert shown.step_ms == pytest.approx((shown.shown_chunks + 1) * 7.5)


def test_the_step_of_objective_step_is_that_of_its_timeline(serve):
    client = serve(default_solver)
    placement = client.post(
        "/v1/placements", json=examples.requests()["throughput"]["value"] | {"chunks": 4}
    ).json()
    asked = examples.requests()["throughput"]["value"] | {
        "objective": "step",
        "schedule": "auto",
        "chunks": 4,
    }
    step = client.post("/v1/placements?wait=30", json=asked).json()
    shown = Timeline.model_validate(client.get(f"/v1/placements/{step['id']}/timeline").json())
    assert shown.step_ms + step["step"]["optimizer_ms"] == pytest.approx(step["objective_value"])
    assert shown.bubble == pytest.approx(step["step"]["bubble"])
    assert client.get(f"/v1/placements/{placement['id']}/timeline").json()["id"] == placement["id"]


def test_timeline_and_trace_have_tags_and_the_trace_every_pass(serve):
    client = serve(default_solver)
    key = client.post("/v1/placements", json=examples.requests()["throughput"]["value"]).json()[
        "id"
    ]
    shown = client.get(f"/v1/placements/{key}/timeline")
    trace = client.get(f"/v1/placements/{key}/trace")
    again = client.get(
        f"/v1/placements/{key}/timeline", headers={"If-None-Match": shown.headers["ETag"]}
    )
    assert again.status_code == 304
    slices = [event for event in trace.json()["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(shown.json()["passes"]) + len(shown.json()["copies"])
    assert trace.headers["Content-Disposition"] == 'attachment; filename="trace.json"'


def test_a_placement_that_places_nothing_has_no_timeline(serve, solvers):
    client = serve(default_solver)
    body = json.loads(json.dumps(examples.requests()["throughput"]["value"]))
    for device in body["cluster"]["devices"]:
        device["memory_bytes"] = 1
    infeasible = client.post("/v1/placements", json=body).json()
    reply = client.get(f"/v1/placements/{infeasible['id']}/timeline")
    assert infeasible["status"] == "infeasible"
    assert (reply.status_code, reply.json()["type"]) == (422, "urn:placer:problem:invalid-request")
    assert "has no map" in reply.json()["detail"]


@pytest.mark.parametrize("what", ["timeline", "trace", "report"])
def test_what_is_not_there_is_a_404(service, what):
    for key in ("0" * 32, "nothing"):
        reply = service.get(f"/v1/placements/{key}/{what}")
        assert (reply.status_code, reply.json()["type"]) == (
            404,
            "urn:placer:problem:no-such-placement",
        )


@pytest.mark.parametrize("what", ["timeline", "trace", "report", "request"])
def test_what_is_shown_of_a_placement_that_is_still_solved_is_409(
    serve, solvers, request_body, what
):
    # It was a 404 that told to POST the request, which had just been answered 202.
    client = serve(solvers.until_stopped)
    id = client.post("/v1/placements?wait=0", json=request_body()).json()["id"]
    reply = client.get(f"/v1/placements/{id}/{what}")
    assert (reply.status_code, reply.json()["type"]) == (409, "urn:placer:problem:not-done")
    assert f"placement {id} is still being solved" in reply.json()["detail"]
    assert reply.headers["Retry-After"] == "1"


def test_the_report_is_one_file_that_fetches_nothing(serve):
    client = serve(default_solver)
    placement = client.post(
        "/v1/placements", json=examples.requests()["throughput"]["value"]
    ).json()
    reply = client.get(f"/v1/placements/{placement['id']}/report")
    assert reply.headers["Content-Type"].startswith("text/html")
    assert not re.search(r"<script|<link|src=|url\(|https?://(?!www\.w3\.org)", reply.text)
    for layer, device in placement["layer_devices"].items():
        assert re.search(rf"{re.escape(layer)}</td><td>{device}", reply.text)
