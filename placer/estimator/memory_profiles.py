"""Profiles that the search by memory solves: without times, with caches, or without samples."""

from __future__ import annotations

from collections.abc import Mapping

from placer.estimator.device_sizes import DEVICE_TYPE
from placer.schema import Profile
from placer.solver.replicas.replication import EDGE_BYTES, LAYER_BYTES


def with_cache(profile: Profile, cache_bytes: Mapping[str, int]) -> Profile:
    """Return the profile with the keys and values of each layer among its buffers."""
    if not cache_bytes:
        return profile
    layers = tuple(
        layer.model_copy(
            update={"buffer_bytes": layer.buffer_bytes + cache_bytes.get(layer.name, 0)}
        )
        for layer in profile.layers
    )
    return profile.model_copy(update={"layers": layers})


def untimed(profile: Profile) -> Profile:
    """Return the profile with times of zero on the one type of devices, as the solver needs."""
    times = {DEVICE_TYPE: 0.0}
    unmeasured: dict[str, dict[str, float]] = {
        "forward_ms": times,
        "backward_ms": times if profile.training else {},
        **{name: {} for name in ("weight_grad_ms", "optimizer_ms", "spread", "host_ms")},
    }
    layers = tuple(layer.model_copy(update=unmeasured) for layer in profile.layers)
    return profile.model_copy(update={"layers": layers, "cluster": None})


def state_alone(profile: Profile) -> Profile:
    """Return the profile with the memory that does not depend on the number of samples."""
    of_layers, of_edges = dict.fromkeys(LAYER_BYTES, 0), dict.fromkeys(EDGE_BYTES, 0)
    layers = tuple(layer.model_copy(update=of_layers) for layer in profile.layers)
    edges = tuple(edge.model_copy(update=of_edges) for edge in profile.edges)
    return profile.model_copy(update={"layers": layers, "edges": edges})
