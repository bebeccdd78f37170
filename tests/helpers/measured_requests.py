"""Requests as profiles of real machines make them: nanoseconds, equal layers, and links of which no
two are alike."""

from __future__ import annotations

import itertools
from random import Random

from placer.errors import InputError
from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile

KINDS = {"NVIDIA H100": 1.0, "NVIDIA H200": 0.87, "cpu": 9.3}
"""Types of device, and how slow they are."""


def measured_request(seed, objectives):
    """A small request, drawn anew until it contradicts itself in nothing."""
    random = Random(seed)
    while True:
        try:
            return _request(random, random.choice(objectives))
        except InputError:
            pass


def _request(random, objective):
    training, count = random.random() < 0.75, random.randint(2, 5)
    kinds = random.choices(
        random.sample(sorted(KINDS), random.randint(1, 2)), k=random.choice([2, 2, 3])
    )
    blocks = [_block(random) for _ in range(random.choice([1, 1, 2]))]
    blocks = [random.choice(blocks) for _ in range(count if len(kinds) == 2 else min(count, 4))]
    names = [f"layers.{index}" for index in range(len(blocks))]
    edges = _edges(random, names)
    sizes = random.choice([(4,), (4, 2), (2, 4), (1, 2, 4)]) if objective == "step" else (4,)
    first, *more = (
        _profile(size, names, blocks, edges, sorted(set(kinds)), training) for size in sizes
    )
    asked = {
        "profile": first,
        "cluster": _cluster(random, kinds, first),
        "objective": objective,
        "constraints": _constraints(
            random, names, [f"cuda:{index}" for index in range(len(kinds))]
        ),
        "schedule": random.choice(["1f1b", "zero-bubble", "interleaved", "fill-drain"]),
        "transfers": random.choice(["added", "overlapped"]),
        "break_ties": random.random() < 0.3,
        "work_limit": random.choice([0.05, 0.5]),
        "workers": 1,
    }
    if objective == "step":
        asked |= {"profiles": more, "batch_size": 4 * random.choice([1, 2])}
        asked |= {
            "step_kind": random.choice(["isolated", "steady-state"]),
            "schedule": random.choice(["auto", asked["schedule"]]),
        }
    else:
        asked["chunks"] = random.choice([1, 2, 4, 7])
    return PlacementRequest(**asked)


def _block(random):
    """What a layer takes of one sample on the fastest device, in ms and bytes."""
    return {
        "forward": random.choice([0.004, 0.3, 12.0]) * random.uniform(0.5, 1),
        "back": random.uniform(1.5, 2.5),
        "weights": random.choice([None, random.uniform(0.2, 0.6)]),
        "params": random.choice([0, random.randint(1_000, 10_000_000)]),
        "saved": random.choice([0, random.randint(1_000, 4_000_000)]),
        "deferred": random.choice([0, random.randint(1_000, 2_000_000)]),
    }


def _profile(size, names, blocks, edges, kinds, training):
    layers = []
    for name, block in zip(names, blocks, strict=True):
        forward = {
            kind: round(block["forward"] * (0.3 + 0.7 * size) * KINDS[kind], 6) for kind in kinds
        }
        backward = {
            kind: round(time * block["back"], 6) for kind, time in forward.items() if training
        }
        told = training and block["weights"] is not None
        trained = block["params"] * training
        layers.append(
            Layer(
                name=name,
                forward_ms=forward,
                backward_ms=backward,
                weight_grad_ms={
                    kind: round(time * block["weights"], 6) for kind, time in backward.items()
                }
                if told
                else {},
                optimizer_ms={kind: round(trained * 3e-9 * KINDS[kind], 6) for kind in kinds}
                if trained
                else {},
                param_bytes=block["params"],
                grad_bytes=trained,
                optimizer_bytes=2 * trained,
                saved_bytes=block["saved"] * size * training,
                backward_workspace_bytes=block["saved"] // 3 * training,
                deferred_bytes=block["deferred"] * size * training,
            )
        )
    values = [
        Edge(
            source=source,
            targets=targets,
            bytes=per * size,
            gradient_bytes=per * size * training,
            saved_by=kept,
        )
        for source, targets, per, kept in edges
    ]
    return Profile(layers=layers, edges=values, training=training, batch_size=size)


def _edges(random, names):
    """A row, sometimes with further readers; in training some of them keep what they read."""
    per_sample = random.randint(1_000, 1_000_000)
    edges = []
    for index, name in enumerate(names[:-1]):
        further = [other for other in names[index + 2 :] if random.random() < 0.15]
        edges.append(
            (
                name,
                [names[index + 1], *further],
                per_sample,
                [name] if random.random() < 0.3 else [],
            )
        )
    return edges


def _cluster(random, kinds, profile):
    whole = (
        sum(
            layer.param_bytes + 3 * layer.grad_bytes + 4 * layer.saved_bytes
            for layer in profile.layers
        )
        + 10
    )
    share = random.choice([0.4, 0.7, 1.0, 2.0, 100, 100, 100])
    devices = [
        Device(
            name=f"cuda:{index}",
            type=kind,
            memory_bytes=int(whole * share * random.choice([1, 1, 0.8])),
        )
        for index, kind in enumerate(kinds)
    ]
    speed, latency = random.choice([1e8, 1e10, 3e11]), random.choice([0, 5e-6, 3e-4])
    links = [
        Link(
            source=a.name,
            target=b.name,
            bandwidth_bytes_per_s=speed * random.uniform(0.95, 1.05),
            latency_s=latency * random.uniform(0.9, 1.2),
        )
        for a, b in itertools.permutations(devices, 2)
    ]
    return Cluster(devices=devices, links=links)


def _constraints(random, names, places):
    rules = {
        "contiguous": random.choice([None, True, True, False]),
        "recompute": random.choice(
            ["never", "never", "auto", "always", {"cuda:0": "always", "*": "auto"}]
        ),
        "pinned": {random.choice(names): random.choice(places)},
        "forbidden": {random.choice(names): [random.choice(places)]},
        "colocated": [tuple(random.sample(names, 2))],
        "max_devices": random.randint(1, len(places)),
        "min_devices": random.randint(1, len(places)),
    }
    always = {"contiguous", "recompute"}
    return Constraints(
        **{name: rule for name, rule in rules.items() if name in always or random.random() < 0.12}
    )
