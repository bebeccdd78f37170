"""Requests for objective ``step`` over chains, whose answers have a closed form."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from placer.schema import Cluster, Device, Edge, Layer, Link, PlacementRequest, Profile


def row(
    times_ms: Sequence[float],
    devices: int = 2,
    memory_bytes: int = 10**9,
    saved_bytes: int = 0,
    grad_bytes: int = 0,
    optimizer_ms: float | None = None,
    size: int = 1,
    **asked: Any,
) -> PlacementRequest:
    """Layers of so many ms forwards and twice that backwards, alike devices, transfers of next to
    nothing."""
    names = [f"l{i}" for i in range(len(times_ms))]
    layers = [
        Layer(
            name=name,
            forward_ms={"t": time},
            backward_ms={"t": 2 * time},
            saved_bytes=saved_bytes,
            grad_bytes=grad_bytes,
            optimizer_ms={} if optimizer_ms is None else {"t": optimizer_ms},
        )
        for name, time in zip(names, times_ms, strict=True)
    ]
    edges = [
        Edge(source=a, targets=(b,), bytes=1, gradient_bytes=1)
        for a, b in itertools.pairwise(names)
    ]
    places = [f"d{i}" for i in range(devices)]
    cluster = Cluster(
        devices=[Device(name=name, type="t", memory_bytes=memory_bytes) for name in places],
        links=[
            Link(source=a, target=b, bandwidth_bytes_per_s=1e15)
            for a, b in itertools.permutations(places, 2)
        ],
    )
    profile = Profile(layers=layers, edges=edges, training=True, batch_size=size)
    return PlacementRequest(profile=profile, cluster=cluster, objective="step", **asked)
