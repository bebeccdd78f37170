"""Training requests with ``replicas="auto"`` and ``"by-stage"``, and their answers as rows.

Devices are alike. On hosts of four, links inside a host have 10 GB/s and 10 us, links between hosts
10 Gbit/s and 50 us; each pair of devices has a link of its own. A batch has four micro-batches for
each device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import permutations
from typing import Any

from placer.schema import Cluster, Constraints, Device, Link, Placement, PlacementRequest
from placer.solver.solve import solve

from . import models, pipedream
from .rows import Wanted, measured
from .unlike_replicas import UnlikeReplicas

PER_HOST = 4
INSIDE_BYTES_PER_S, INSIDE_LATENCY_S = 10e9, 10e-6
BETWEEN_BYTES_PER_S, BETWEEN_LATENCY_S = 10e9 / 8, 50e-6
PLENTY_BYTES = 2**50
MICRO_BATCHES_OF_A_DEVICE = 4
MICRO_BATCHES = {4: 12, 8: 56, 16: 240}
"""By number of devices K, a batch that K and K - 1 replicas can share."""

CONFIGURATIONS = {
    ("vgg16", 4): "3-1",
    ("vgg16", 8): "7-1",
    ("vgg16", 16): "15-1",
    ("gnmt_large", 16): "1-1-1-1-1-1-1-1-1-1-1-1-3-1",
}
"""The replicas of each stage in the configurations that PipeDream's authors ran with replicas.

Source: ``runtime/*/models/*/gpus=N/hybrid_conf.json`` of github.com/msr-fiddle/pipedream, commit
11c40c0.
"""


def of_profile(
    name: str, devices: int, per_host: int = PER_HOST, **asked: object
) -> PlacementRequest:
    """Return a request for a published profile.

    Args:
        name: the name of the profile.
        devices: the number of devices.
        per_host: the devices of a host.
        asked: further fields of the request.
    """
    cluster = of_hosts(devices, "published", per_host)
    return pipedream.request(name, devices, **{**_usual(devices), "cluster": cluster, **asked})


def by_stage(name: str, devices: int, **asked: object) -> PlacementRequest:
    """Return a request for a published profile, with one exchange for each micro-batch.

    PipeDream exchanges gradients after every micro-batch of a replica, Placer once per step. So
    gradients count as often as a device has micro-batches in a step.

    Args:
        name: the name of the profile.
        devices: the number of devices, each on a host of its own.
        asked: further fields of the request.
    """
    chunks = MICRO_BATCHES[devices]
    request = of_profile(
        name,
        devices,
        per_host=1,
        objective="throughput",
        schedule="1f1b",
        step_kind="isolated",
        chunks=chunks,
        **{"replicas": "by-stage", **asked},
    )
    layers = tuple(
        layer.model_copy(update={"grad_bytes": layer.grad_bytes * (chunks // devices)})
        for layer in request.profile.layers
    )
    profile = request.profile.model_copy(update={"layers": layers})
    return request.model_copy(update={"profile": profile})


def of_model(name: str, devices: int, **asked: object) -> PlacementRequest:
    """Return a request for a measured model.

    Args:
        name: the name of the model.
        devices: the number of devices.
        asked: further fields of the request.
    """
    cluster = of_hosts(devices, models.SLOW)
    return models.request(name, **{**_usual(devices), "cluster": cluster, **asked})


def of_hosts(devices: int, kind: str, per_host: int = PER_HOST) -> Cluster:
    """Return a cluster of alike devices.

    Args:
        devices: their number.
        kind: their type.
        per_host: the devices of a host.
    """
    host_of = {
        f"host{index // per_host}/device:{index % per_host}": f"host{index // per_host}"
        for index in range(devices)
    }
    return Cluster(
        devices=tuple(
            Device(name=name, type=kind, memory_bytes=PLENTY_BYTES, host=host)
            for name, host in host_of.items()
        ),
        links=tuple(_link(a, b, host_of[a] == host_of[b]) for a, b in permutations(host_of, 2)),
    )


def _link(source: str, target: str, inside: bool) -> Link:
    return Link(
        source=source,
        target=target,
        bandwidth_bytes_per_s=INSIDE_BYTES_PER_S if inside else BETWEEN_BYTES_PER_S,
        latency_s=INSIDE_LATENCY_S if inside else BETWEEN_LATENCY_S,
    )


def _usual(devices: int) -> dict[str, Any]:
    return {
        "replicas": "auto",
        "objective": "step",
        "schedule": "auto",
        "step_kind": "steady-state",
        "chunks": MICRO_BATCHES_OF_A_DEVICE * devices,
        "constraints": Constraints(contiguous=True),
    }


def row(made: Callable[[], PlacementRequest], wanted: Wanted, case: str) -> dict[str, Any]:
    """Return the row of a request."""
    request = made()
    return measured(case, request.objective, lambda: solve(request), wanted, figures=_figures)


def row_of_profile(
    made: Callable[[], PlacementRequest], wanted: Wanted, case: str
) -> dict[str, Any]:
    """Return the row of a request by objective ``throughput``, with plans of unlike replicas.

    The peers' values are Placer's cost of PipeDream's plan, and of the best plan whose stages may
    have unlike numbers of replicas, by a program apart from the solver.
    """

    def note(request: PlacementRequest, unlike: UnlikeReplicas) -> str:
        alone_ms = unlike.data_parallel_of_pipedream()
        return f"data parallelism {alone_ms:.4g} ms"

    return _bottleneck_row(made(), wanted, case, note)


def row_by_stage(made: Callable[[], PlacementRequest], wanted: Wanted, case: str) -> dict[str, Any]:
    """Return the row of a request with ``replicas="by-stage"``; the peers as ``row_of_profile``."""

    def note(request: PlacementRequest, unlike: UnlikeReplicas) -> str:
        ran = CONFIGURATIONS.get((request.profile.model, len(request.devices)), "not known")
        equal = solve(request.model_copy(update={"replicas": "auto"})).objective_value
        return f"its authors ran: {ran}; equal pipelines {equal:.4g} ms"

    return _bottleneck_row(made(), wanted, case, note)


def _bottleneck_row(
    request: PlacementRequest,
    wanted: Wanted,
    case: str,
    note: Callable[[PlacementRequest, UnlikeReplicas], str],
) -> dict[str, Any]:
    """Return the row of a bottleneck, with plans of unlike replicas and a note on PipeDream's."""
    unlike = UnlikeReplicas(request)
    theirs, best = unlike.of_pipedream(), unlike.best()

    def figures(placement: Placement) -> Mapping[str, str | float | None]:
        return _figures(placement) | {
            "plan of PipeDream": f"{theirs}, {theirs.predicted_ms:.4g} ms by its estimate; "
            + note(request, unlike),
            "best with unlike replicas": str(best),
        }

    def peers() -> dict[str, float | None]:
        return {
            "PipeDream's plan": unlike.bottleneck(theirs),
            "unlike replicas": unlike.bottleneck(best),
        }

    return measured(
        case, "bottleneck", lambda: solve(request), wanted, peers=peers, figures=figures
    )


def _figures(placement: Placement) -> dict[str, str | float | None]:
    """Return the shape of an answer, and how busy the machine is."""
    return {"shape": _shape(placement), "load of the machine": round(os.getloadavg()[0], 1)}


def _shape(placement: Placement) -> str:
    if len(set(placement.replicas_by_stage)) > 1:
        return "-".join(map(str, placement.replicas_by_stage))
    replicas = max(map(len, placement.replicas.values()), default=1)
    return f"{len(placement.stages)} x {replicas}"
