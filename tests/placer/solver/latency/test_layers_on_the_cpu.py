"""A device whose layers may rest on a host, beside the CPU of the host, which may compute them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from small_requests import SHARE
from tier_clusters import memory_bytes, pass_ms

from placer import GenerationOptions, Placement, PlacementRequest, Profile, solve
from placer.errors import PlacementError
from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, Rate
from placer.solver.check import check
from placer.solver.latency import host_weights

NAMES = "abcdefghijklmnopqrstuvwx"
CPU = "cpu:0"


def cluster(
    accelerators: int, memory: int, host_memory: int, rate: float, disk: float | None = None
) -> Cluster:
    """Accelerators with links between them, and the CPU of their host."""
    devices = [
        Device(
            name=f"cuda:{number}",
            type="gpu",
            memory_bytes=memory,
            from_host=Rate(bandwidth_bytes_per_s=rate, latency_s=1e-4),
            from_disk=Rate(bandwidth_bytes_per_s=disk, latency_s=3e-4) if disk else None,
        )
        for number in range(accelerators)
    ]
    devices.append(Device(name=CPU, type="cpu", memory_bytes=host_memory))
    links = tuple(
        Link(source=one.name, target=other.name, bandwidth_bytes_per_s=1e6, latency_s=1e-4)
        for one, other in itertools.permutations(devices, 2)
    )
    return Cluster(devices=tuple(devices), links=links)


def drawn(seed: int, count: int, accelerators: int = 1) -> PlacementRequest:
    """A request for a pass or a generation, of which the accelerators hold a part."""
    draw = random.Random(seed)
    names = NAMES[:count]
    sizes = [draw.choice((300, 500, 800)) for _ in names]
    slower = draw.choice((2.0, 5.0, 20.0))
    layers = [
        Layer(
            name=name,
            forward_ms={"gpu": (own := draw.choice((0.2, 0.5, 1.0))), "cpu": own * slower},
            param_bytes=size,
            forward_workspace_bytes=draw.randrange(100),
        )
        for name, size in zip(names, sizes, strict=True)
    ]
    edges = [
        Edge(source=one, targets=(other,), bytes=draw.randrange(20, 90))
        for one, other in itertools.pairwise(names)
    ]
    if draw.random() < 0.3:
        edges.append(Edge(source="a", targets=("c",), bytes=40))
    disk = draw.choice((None, None, 3e5))
    fields: dict[str, Any] = {"objective": "latency"}
    if draw.random() < 0.6:
        beside = draw.choice((1.0, 3.0))
        token = [
            layer.model_copy(
                update={
                    "forward_ms": {"gpu": 0.05, "cpu": 0.05 * beside},
                    "buffer_bytes": draw.randrange(40),
                }
            )
            for layer in layers
        ]
        new_tokens = draw.choice((2, 5, 30))
        fields = {
            "objective": "generation",
            "token_profile": Profile(layers=tuple(token), edges=tuple(edges)),
            "generation": GenerationOptions(prompt_tokens=4, new_tokens=new_tokens),
        }
    host_memory = draw.choice((sum(sizes) // 2, 10**6))
    memory = int(draw.choice((0.4, 0.6, 0.8)) * sum(sizes) / accelerators) + 500
    return PlacementRequest(
        profile=Profile(layers=tuple(layers), edges=tuple(edges)),
        cluster=cluster(accelerators, memory, host_memory, draw.choice((3e5, 1e6, 3e6)), disk),
        host_memory_bytes=draw.choice((sum(sizes) // 3, 10**6)),
        disk_bytes=10**6 if disk else None,
        constraints=Constraints(contiguous=draw.choice((None, None, False, True))),
        **fields,
    )


class Choice(NamedTuple):
    """A map with resting layers, and its objective."""

    where: dict[str, str]
    resting: dict[str, str]
    value: float


def value_of(asked: PlacementRequest, where: dict[str, str], resting: dict[str, str]) -> float:
    """The objective of a map with resting layers."""
    if asked.generation is None or asked.token_profile is None:
        return pass_ms(asked, where, resting)
    count = asked.generation.new_tokens
    token = asked.model_copy(
        update={"profile": asked.token_profile, "cluster": asked.placed_on},
    )
    if resting:
        return pass_ms(asked, where, resting) + (count - 1) * pass_ms(token, where, resting)
    mean = [
        one.model_copy(
            update={
                "forward_ms": {
                    kind: (time + (count - 1) * other.forward_ms[kind]) / count
                    for kind, time in one.forward_ms.items()
                }
            }
        )
        for one, other in zip(asked.profile.layers, asked.token_profile.layers, strict=True)
    ]
    profile = asked.profile.model_copy(update={"layers": tuple(mean)})
    return count * pass_ms(asked.model_copy(update={"profile": profile}), where, {})


def choices(asked: PlacementRequest) -> Iterator[Choice]:
    """Every map with every choice of resting layers that keeps within the memory."""
    held = asked.token_profile or asked.profile
    names = [layer.name for layer in held.layers]
    sizes = {layer.name: layer.param_bytes for layer in held.layers}
    of_memory = asked.model_copy(update={"profile": held, "cluster": asked.placed_on})
    tiers = ["", "host"] + (["disk"] if asked.disk_bytes is not None else [])
    for chosen in itertools.product([one.name for one in asked.devices], repeat=len(names)):
        runs = [device for device, _ in itertools.groupby(chosen)]
        if asked.constraints.contiguous and len(set(runs)) < len(runs):
            continue
        where = dict(zip(names, chosen, strict=True))
        own = {
            device.name: [layer for layer in held.layers if where[layer.name] == device.name]
            for device in asked.devices
        }
        places = [tiers if device != CPU else [""] for device in chosen]
        for tier in itertools.product(*places):
            resting = {name: at for name, at in zip(names, tier, strict=True) if at}
            needs = {name: memory_bytes(of_memory, one, resting) for name, one in own.items()}
            on_host = sum(sizes[name] for name, at in resting.items() if at == "host")
            limits = {device.name: device.usable_bytes for device in asked.devices}
            if on_host > (asked.host_memory_bytes or 0) or on_host + needs[CPU] > limits[CPU]:
                continue
            if all(needs[name] <= limit for name, limit in limits.items()):
                yield Choice(where, resting, value_of(asked, where, resting))


SEEDS = range(math.ceil(300 * SHARE))


@pytest.mark.parametrize("seed", SEEDS)
def test_small_requests_have_the_best_of_all_maps_and_resting_layers(seed, monkeypatch):
    monkeypatch.setattr(host_weights, "FEW", 100_000)
    asked = drawn(seed, 5)
    expected = min((one.value for one in choices(asked)), default=None)
    found = solve(asked)
    if expected is None:
        assert found.status == "infeasible"
        return
    assert found.objective_value == pytest.approx(expected)
    assert found.status == "optimal"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_search_is_near_the_best_and_its_bound_below(seed, monkeypatch):
    asked = drawn(seed, 6)
    expected = min((one.value for one in choices(asked)), default=None)
    monkeypatch.setattr(host_weights, "FEW", 0)
    found = solve(asked)
    if expected is None:
        assert not found.layer_devices
        return
    assert found.objective_value is not None and found.bound is not None
    assert found.bound <= expected * (1 + 1e-9)
    assert expected * (1 - 1e-9) <= found.objective_value <= 1.1 * expected


@pytest.mark.parametrize("seed", SEEDS)
def test_two_accelerators_beside_the_cpu(seed, monkeypatch):
    asked = drawn(seed, 4, accelerators=2)
    expected = min((one.value for one in choices(asked)), default=None)
    monkeypatch.setattr(host_weights, "FEW", 0)
    found = solve(asked)
    if expected is None:
        assert not found.layer_devices
        return
    assert found.objective_value is not None and found.bound is not None
    # Nothing rests where the accelerators hold all layers.
    if found.resting or CPU in found.layer_devices.values():
        assert found.bound <= expected * (1 + 1e-9)
        assert expected * (1 - 1e-9) <= found.objective_value <= 1.1 * expected
