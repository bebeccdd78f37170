"""Naming of alike devices: the first named takes the first stage, unless rules differ."""

from __future__ import annotations

from typing import Any

import pytest

from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver.solve import solve

NAMES = ("cuda:0", "cuda:1", "cuda:2")


def _request(slow: str | None = None, **options: Any) -> PlacementRequest:
    layers = [
        Layer(name=f"l{i}", forward_ms={"gpu": 1.0 + i % 3}, backward_ms={"gpu": 2.0})
        for i in range(9)
    ]
    edges = [
        Edge(source=f"l{i}", targets=[f"l{i + 1}"], bytes=100, gradient_bytes=100) for i in range(8)
    ]
    links = [
        Link(source=a, target=b, bandwidth_bytes_per_s=1e3 if slow in (a, b) else 1e6)
        for a in NAMES
        for b in NAMES
        if a != b
    ]
    devices = [Device(name=name, type="gpu", memory_bytes=10**9) for name in NAMES]
    profile = Profile(layers=layers, edges=edges, training=True)
    return PlacementRequest(
        profile=profile, cluster=Cluster(devices=devices, links=links), chunks=4, **options
    )


@pytest.mark.parametrize("objective", ["throughput", "step", "latency", "memory"])
def test_stages_follow_the_devices_names(objective: str) -> None:
    for seed in range(3):
        placement = solve(_request(objective=objective, seed=seed))
        assert list(placement.stages) == sorted(placement.stages)


def test_a_pin_is_kept_and_the_others_follow_their_names() -> None:
    placement = solve(_request(constraints=Constraints(pinned={"l8": "cuda:0"}, contiguous=True)))
    assert placement.layer_devices["l8"] == "cuda:0"
    assert placement.stages[-1] == "cuda:0"


def test_devices_that_links_tell_apart_are_not_exchanged_at_a_cost() -> None:
    request = _request(slow="cuda:0")
    placement = solve(request)
    at_best = solve(request.model_copy(update={"seed": 7}))
    assert placement.objective_value == at_best.objective_value
    assert "cuda:0" not in placement.stages[1:-1]
