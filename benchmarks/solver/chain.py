"""Chains of synthetic layers."""

from __future__ import annotations

from itertools import permutations

from placer.schema import Cluster, Device, Edge, Layer, Link, PlacementRequest, Profile


def request(
    layers: int, devices: int, *, memory_bytes: int = 2**27, **asked: object
) -> PlacementRequest:
    """Return a training request for a chain on alike devices with links of 10 GB/s.

    Args:
        layers: the number of layers.
        devices: the number of devices.
        memory_bytes: the memory of each device.
        asked: further fields of the request.
    """
    profile = Profile(
        training=True,
        layers=tuple(_layer(index) for index in range(layers)),
        edges=tuple(
            Edge(
                source=f"layer{i}",
                targets=(f"layer{i + 1}",),
                bytes=1_000_000,
                gradient_bytes=1_000_000,
            )
            for i in range(layers - 1)
        ),
    )
    names = [f"device:{index}" for index in range(devices)]
    cluster = Cluster(
        devices=tuple(
            Device(name=name, type="made up", memory_bytes=memory_bytes) for name in names
        ),
        links=tuple(
            Link(source=a, target=b, bandwidth_bytes_per_s=1e10) for a, b in permutations(names, 2)
        ),
    )
    return PlacementRequest.model_validate(
        {"profile": profile, "cluster": cluster, "chunks": 8, **asked}
    )


def _layer(index: int) -> Layer:
    return Layer(
        name=f"layer{index}",
        forward_ms={"made up": 1.0 + index % 7},
        backward_ms={"made up": 2.0 + index % 5},
        param_bytes=1_000_000 * (1 + index % 3),
        saved_bytes=2_000_000,
    )
