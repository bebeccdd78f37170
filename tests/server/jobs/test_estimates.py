"""Estimates of graphs that clients send, without GPUs and without weights."""

from __future__ import annotations

import copy
from typing import Any

from fastapi.testclient import TestClient

from placer.schema import Estimate
from placer_server.openapi import examples


def body(**changes: Any) -> dict[str, Any]:
    value = copy.deepcopy(examples.estimates()["two cards"]["value"])
    return {**value, **changes}


def test_a_graph_is_estimated_on_devices_that_do_not_exist(service: TestClient) -> None:
    reply = service.post("/v1/estimates", json=body())
    assert reply.status_code == 200, reply.text
    found = Estimate.model_validate_json(reply.content)
    assert found.fits and found.training
    assert sum(device.memory.param_bytes for device in found.devices) == 16 * 16 * 4


def test_a_faulty_request_is_refused_with_its_place(service: TestClient) -> None:
    reply = service.post("/v1/estimates", json=body(chunks=0))
    assert reply.status_code == 422
    assert reply.json()["errors"][0]["pointer"] == "#/chunks"


def test_devices_without_sizes_are_refused_with_the_reason(service: TestClient) -> None:
    reply = service.post("/v1/estimates", json=body(devices="2"))
    assert reply.status_code == 422
    assert reply.json()["type"] == "urn:placer:problem:invalid-graph"
    assert "without its unit" in reply.json()["detail"]
