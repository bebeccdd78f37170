"""Small random joint requests, and their best answer by trying every map of every model.

The enumeration reads the formulas of ``placer.schema.joint`` by itself: it plays one model after
another, step by step, and never makes a joint profile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from random import Random
from typing import NamedTuple

from placer.schema import Cluster, Device, Edge, Layer, Link, Profile
from placer.schema.joint import JointRequest, ProfiledModel


def chain(cluster: Cluster, *layers: Layer, edge_bytes: int = 0) -> Profile:
    """Return the profile of a chain of layers."""
    names = [layer.name for layer in layers]
    edges = tuple(
        Edge(source=one, targets=(other,), bytes=edge_bytes)
        for one, other in itertools.pairwise(names)
    )
    return Profile(layers=layers, edges=edges, cluster=cluster)


def pair(memory_bytes: int, latency_s: float = 0.001, linked: bool = True) -> Cluster:
    """Return two equal devices, with links both ways or in one direction alone."""
    names = ("cpu:0", "cpu:1")
    ways = [names, names[::-1]] if linked else [names]
    return Cluster(
        devices=tuple(Device(name=name, type="a", memory_bytes=memory_bytes) for name in names),
        links=tuple(
            Link(source=one, target=other, bandwidth_bytes_per_s=1e6, latency_s=latency_s)
            for one, other in ways
        ),
    )


def random_request(seed: int) -> JointRequest:
    """Return a request of one to three models with unlike devices and links and tight memory."""
    random = Random(seed)
    devices = random.choice((2, 2, 3))
    names = [f"cpu:{number}" for number in range(devices)]
    memory = random.choice((120, 160, 220, 400))
    links = [
        Link(
            source=one,
            target=other,
            bandwidth_bytes_per_s=random.choice((1e4, 4e4)),
            latency_s=random.choice((0.0, 1e-3)),
        )
        for one, other in itertools.permutations(names, 2)
        if random.random() < 0.85 or names[0] in (one, other)
    ]
    cluster = Cluster(
        devices=tuple(
            Device(name=name, type=random.choice("ab"), memory_bytes=memory) for name in names
        ),
        links=tuple(links),
    )
    sizes = random.choice(((5,), (3, 4), (2, 3, 2)) if devices == 2 else ((4,), (3, 3), (2, 2, 2)))
    models = {
        f"model{number}": ProfiledModel(
            profile=_profile(random, size, cluster), runs=random.choice((1, 2, 7, 50))
        )
        for number, size in enumerate(sizes)
    }
    return JointRequest(models=models, time_limit_s=20, workers=1)


def _profile(random: Random, count: int, cluster: Cluster) -> Profile:
    layers = tuple(
        Layer(
            name=f"layer{number}",
            forward_ms={kind: random.randint(0, 20) / 2 for kind in "ab"},
            param_bytes=random.randint(0, 60),
            buffer_bytes=random.randint(0, 5),
            forward_workspace_bytes=random.randint(0, 30),
        )
        for number in range(count)
    )
    edges = []
    for number in range(count - 1):
        later = [f"layer{other}" for other in range(number + 1, count) if random.random() < 0.5]
        if later:
            source = f"layer{number}"
            edges.append(Edge(source=source, targets=tuple(later), bytes=random.randint(0, 40)))
    is_colocated = count > 2 and random.random() < 0.2
    groups = ((layers[0].name, layers[-1].name),) if is_colocated else ()
    return Profile(layers=layers, edges=tuple(edges), colocated=groups, cluster=cluster)


class _Option(NamedTuple):
    """A map of one model: its time in a request, and by device its weights and its peak."""

    time_ms: float
    weights: dict[str, int]
    peak: dict[str, int]


def best_ms(request: JointRequest) -> float | None:
    """Return the shortest time of a request by enumeration; None if nothing fits."""
    cluster = request.cluster
    options = [list(_options(model, cluster)) for model in request.models.values()]
    best = None
    for chosen in itertools.product(*options):
        time_ms = sum(option.time_ms for option in chosen)
        if (best is None or time_ms < best) and all(
            sum(option.weights[device.name] for option in chosen)
            + max(option.peak[device.name] for option in chosen)
            <= device.usable_bytes
            for device in cluster.devices
        ):
            best = time_ms
    return best


def _options(model: ProfiledModel, cluster: Cluster) -> Iterator[_Option]:
    profile = model.profile
    names = [layer.name for layer in profile.layers]
    devices = [device.name for device in cluster.devices]
    for places in itertools.product(devices, repeat=len(names)):
        where = dict(zip(names, places, strict=True))
        if any(len({where[name] for name in group}) > 1 for group in profile.colocated):
            continue
        time_ms = _latency_ms(profile, cluster, where)
        if time_ms is not None:
            weights = dict.fromkeys(devices, 0)
            for layer in profile.layers:
                weights[where[layer.name]] += layer.param_bytes + layer.buffer_bytes
            peaks = {device: _peak(profile, where, device) for device in devices}
            yield _Option(model.runs * time_ms, weights, peaks)


def _latency_ms(profile: Profile, cluster: Cluster, where: Mapping[str, str]) -> float | None:
    """Return the last finish; None if a value has no link."""
    kinds = {device.name: device.type for device in cluster.devices}
    done: dict[str, float] = {}
    free = dict.fromkeys(kinds, 0.0)
    for layer in profile.layers:
        here = where[layer.name]
        start = free[here]
        for edge in profile.edges:
            if layer.name not in edge.targets:
                continue
            there = where[edge.source]
            link = cluster.link(there, here)
            if there != here and link is None:
                return None
            sent = 0.0
            if there != here and link is not None:
                sent = 1e3 * (link.latency_s + edge.bytes / link.bandwidth_bytes_per_s)
            start = max(start, done[edge.source] + sent)
        done[layer.name] = free[here] = start + layer.forward_ms[kinds[here]]
    return max(done.values())


def _peak(profile: Profile, where: Mapping[str, str], device: str) -> int:
    """Return the most that values and the running layer take on a device at any step."""
    order = {layer.name: step for step, layer in enumerate(profile.layers)}
    peak = 0
    for step, layer in enumerate(profile.layers):
        held = layer.forward_workspace_bytes if where[layer.name] == device else 0
        for edge in profile.edges:
            readers = [order[name] for name in edge.targets]
            if where[edge.source] != device:
                readers = [order[name] for name in edge.targets if where[name] == device]
            if readers and order[edge.source] <= step <= max(readers):
                held += edge.bytes
        peak = max(peak, held)
    return peak
