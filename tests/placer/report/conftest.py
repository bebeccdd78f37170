from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from placer.schema import (
    Cluster,
    Device,
    DeviceLoad,
    Edge,
    Layer,
    Link,
    MemoryUse,
    Placement,
    Profile,
)

KIB = 1024


@pytest.fixture
def make_profile() -> Callable[..., Profile]:
    """Layers in a row with these forward times, in ms; backward takes twice as long."""

    def make(
        times_ms: dict[str, float], kind: str = "H200", training: bool = True, **changes: Any
    ) -> Profile:
        names = list(times_ms)
        fields: dict[str, Any] = {
            "model": "Net",
            "training": training,
            "optimizer": "Adam" if training else None,
            "layers": tuple(
                Layer(
                    name=name,
                    module="Linear",
                    forward_ms={kind: time},
                    backward_ms={kind: 2 * time} if training else {},
                    param_bytes=4 * KIB,
                    saved_bytes=KIB,
                    forward_workspace_bytes=2 * KIB,
                    backward_workspace_bytes=3 * KIB,
                )
                for name, time in times_ms.items()
            ),
            "edges": tuple(
                Edge(source=a, targets=(b,), bytes=8) for a, b in itertools.pairwise(names)
            ),
            "cluster": Cluster(
                devices=tuple(
                    Device(name=f"cuda:{index}", type=kind, memory_bytes=KIB**3) for index in (0, 1)
                ),
                links=(Link(source="cuda:0", target="cuda:1", bandwidth_bytes_per_s=1e11),),
            ),
        }
        return Profile(**fields | changes)

    return make


@pytest.fixture
def make_placement() -> Callable[..., Placement]:
    """Layers on devices, and how long each device is busy, in ms."""

    def make(
        layer_devices: dict[str, str], loads_ms: dict[str, float], **changes: Any
    ) -> Placement:
        fields: dict[str, Any] = {
            "model": "Net",
            "status": "optimal",
            "objective": "throughput",
            "objective_value": max(loads_ms.values()),
            "bound": max(loads_ms.values()),
            "gap": 0.0,
            "layer_devices": layer_devices,
            "stages": tuple(dict.fromkeys(layer_devices.values())),
            "training": True,
            "devices": tuple(
                DeviceLoad(
                    device=device,
                    layers=1,
                    compute_ms=0.75 * load,
                    send_ms=0.25 * load,
                    receive_ms=0,
                    load_ms=load,
                    memory=MemoryUse(param_bytes=4 * KIB, activation_bytes=KIB),
                    limit_bytes=16 * KIB,
                    bottleneck=load == max(loads_ms.values()),
                )
                for device, load in loads_ms.items()
            ),
        }
        return Placement(**fields | changes)

    return make
