"""Optimizer state on the host: every map of small chains, the referee's rules, and what is refused.

The values of the models are of one byte. So a step of one micro-batch takes the time of all layers
and of the longest optimizer, and a device's memory is a sum over its layers.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn

from placer import InputError, Placement, PlacementError, evaluate, refine, solve
from placer.distributed import build
from placer.report.explain import proven
from placer.schema import (
    Cluster,
    Device,
    Edge,
    Layer,
    Link,
    PlacementRequest,
    Profile,
    Rate,
)
from placer.solver.check import check
from placer_server.judge.timeline import timeline

MIB = 2**20
BUCKET = 64 * MIB
NAMES = "abcdefgh"
SEEDS = 12


def _profile(draw: random.Random, count: int, **fields: Any) -> Profile:
    layers = []
    for name in NAMES[:count]:
        size = draw.choice((10, 40, 150, 300)) * MIB
        is_trained = draw.random() < 0.8
        layers.append(
            Layer(
                name=name,
                forward_ms={"t": draw.choice((0.5, 1.0, 2.0))},
                backward_ms={"t": draw.choice((1.0, 2.0))},
                optimizer_ms={"t": draw.choice((0.1, 4.0)) * is_trained},
                param_bytes=size,
                grad_bytes=size * is_trained,
                optimizer_bytes=draw.choice((1, 2)) * size * is_trained,
            )
        )
    edges = [
        Edge(source=a, targets=(b,), bytes=1, gradient_bytes=1)
        for a, b in itertools.pairwise(NAMES[:count])
    ]
    ratio = draw.choice((0.0, 0.3, 1.0))
    return Profile(
        layers=layers, edges=edges, training=True, optimizer_workspace_ratio=ratio, **fields
    )


def _cluster(limits: list[int], gigabytes: tuple[float, float] = (50.0, 25.0)) -> Cluster:
    """Devices of one type. The first has a slower link to its host, which counts for all of them.

    Args:
        limits: the memory of each device in bytes.
        gigabytes: from the host and to it, in 10^9 bytes per second.
    """
    devices = [
        Device(
            name=f"d{number}",
            type="t",
            memory_bytes=limit + 5,
            reserve_bytes=5,
            from_host=Rate(bandwidth_bytes_per_s=(1 + (number > 0)) * 1e9 * gigabytes[0]),
            to_host=Rate(bandwidth_bytes_per_s=(1 + (number > 0)) * 1e9 * gigabytes[1]),
        )
        for number, limit in enumerate(limits)
    ]
    links = [
        Link(source=one.name, target=other.name, bandwidth_bytes_per_s=1e12)
        for one, other in itertools.permutations(devices, 2)
    ]
    return Cluster(devices=devices, links=links)


def _request(seed: int, place: str, share: float, **fields: Any) -> PlacementRequest:
    """A request of which the devices together hold about a share of all state."""
    draw = random.Random(seed)
    profile = _profile(draw, draw.randint(2, 5))
    total = sum(
        layer.param_bytes + layer.grad_bytes + layer.optimizer_bytes for layer in profile.layers
    )
    count = draw.randint(1, 3)
    limits = [int(share * total / count * draw.uniform(0.9, 1.4)) for _ in range(count)]
    options = {"objective": "step", "schedule": "1f1b", **fields}
    return PlacementRequest(
        profile=profile, cluster=_cluster(limits), optimizer_state=place, **options
    )


def _maps(request: PlacementRequest) -> Iterator[list[list[Layer]]]:
    """Every contiguous map of a chain: the layers of each device."""
    layers, count = list(request.profile.layers), len(request.devices)
    for used in range(1, count + 1):
        for order in itertools.permutations(range(count), used):
            for cuts in itertools.combinations(range(1, len(layers)), used - 1):
                held: list[list[Layer]] = [[] for _ in range(count)]
                ends = [0, *cuts, len(layers)]
                for device, (begin, end) in zip(order, itertools.pairwise(ends), strict=True):
                    held[device] = layers[begin:end]
                yield held


def _buffers(request: PlacementRequest) -> int:
    """Two buckets and the largest layer that exceeds a bucket, but at most all of the state."""
    profile = request.profile
    ratio = profile.optimizer_workspace_ratio
    rows = [(layer.optimizer_bytes, layer.grad_bytes) for layer in profile.layers]
    largest = max((s + ratio * g for s, g in rows if s + g > BUCKET), default=0.0)
    return math.ceil(
        round(min(2 * BUCKET + ratio * BUCKET + largest, sum(s + ratio * g for s, g in rows)), 3)
    )


def _best_ms(request: PlacementRequest, place: str) -> float | None:
    """The shortest step of all maps that fit; None if none does."""
    times = []
    passes_ms = sum(layer.forward_ms["t"] + layer.backward_ms["t"] for layer in _layers(request))
    ratio = request.profile.optimizer_workspace_ratio
    for held in _maps(request):
        optimizers = []
        for own, device in zip(held, request.devices, strict=True):
            limit = device.memory_bytes - device.reserve_bytes
            need = sum(layer.param_bytes + layer.grad_bytes for layer in own)
            if place == "device":
                need += sum(layer.optimizer_bytes for layer in own)
                need += math.ceil(ratio * sum(layer.grad_bytes for layer in own))
            else:
                limit -= _buffers(request)
            if own and need > limit:
                break
            # 50 GB/s there and 25 GB/s back: 0.06 ms for a million bytes
            copies = [6e-8 * layer.optimizer_bytes * (place == "host") for layer in own]
            mine = [layer.optimizer_ms["t"] for layer in own]
            optimizers.append(sum(map(max, mine, copies)))
        else:
            times.append(passes_ms + max(optimizers))
    return min(times, default=None)


def _layers(request: PlacementRequest) -> tuple[Layer, ...]:
    return request.profile.layers


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_best_step_is_found_wherever_state_may_be(seed: int) -> None:
    share = random.Random(seed).choice((0.5, 0.8, 1.0, 1.6))
    on_device, on_host = (
        _best_ms(_request(seed, "device", share), place) for place in ("device", "host")
    )
    known = {"device": on_device, "host": on_host}
    known["auto"] = on_host if on_device is None else on_device
    for place, value in known.items():
        found = solve(_request(seed, place, share))
        assert found.objective_value == (None if value is None else pytest.approx(value))
        assert found.status == ("infeasible" if value is None else "optimal")
        chosen = (
            "host" if place == "auto" and on_device is None else place.replace("auto", "device")
        )
        assert found.optimizer_state == chosen


def test_the_drawn_requests_have_every_outcome() -> None:
    outcomes = set()
    for seed in range(SEEDS):
        share = random.Random(seed).choice((0.5, 0.8, 1.0, 1.6))
        asked = _request(seed, "auto", share)
        outcomes.add(tuple(_best_ms(asked, place) is None for place in ("device", "host")))
    assert outcomes == {(False, False), (True, False), (True, True)} | (outcomes & {(False, True)})


def _fitting(**fields: Any) -> PlacementRequest:
    """Two layers of 1 GiB with 2 GiB of state each, for two devices of 3 GiB."""
    layers = [
        Layer(
            name=name,
            forward_ms={"t": 1.0},
            backward_ms={"t": 2.0},
            param_bytes=512 * MIB,
            grad_bytes=512 * MIB,
            optimizer_bytes=1024 * MIB,
            optimizer_ms={"t": 1.0},
        )
        for name in "ab"
    ]
    edge = Edge(source="a", targets=("b",), bytes=1, gradient_bytes=1)
    profile = Profile(layers=layers, edges=(edge,), training=True)
    options = {"objective": "step", "schedule": "1f1b", "optimizer_state": "host", **fields}
    cluster = options.pop("cluster", _cluster([2304 * MIB, 2304 * MIB]))
    return PlacementRequest(profile=profile, cluster=cluster, **options)


def test_the_step_and_the_limits_are_as_written() -> None:
    found = solve(_fitting())
    # 2^30 bytes at 50 and 25 GB/s, behind passes of 3 ms on each device
    copies_ms = 2**30 / 50e6 + 2**30 / 25e6
    assert found.objective_value == pytest.approx(6 + copies_ms)
    assert [load.memory.optimizer_bytes for load in found.devices] == [0, 0]
    # two buckets, and a layer that is larger
    assert [load.limit_bytes for load in found.devices] == [(2304 - 128 - 1024) * MIB] * 2
    assert "optimizer   its state rests on the host" in "\n".join(proven(found))


def test_the_reason_why_nothing_fits_has_the_buffers() -> None:
    found = solve(_fitting(cluster=_cluster([1900 * MIB] * 2), optimizer_state="auto"))
    assert found.infeasible is not None
    assert found.infeasible.reason.endswith(
        "this is with optimizer state on the host, whose buffers take 1.1 GiB of every limit"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "throughput", "chunks": 4},
        {"objective": "memory", "chunks": 2},
        {"objective": "devices", "bottleneck_ms": 100.0},
        {"objective": "step", "chunks": 4, "schedule": "auto", "step_kind": "steady-state"},
        {"objective": "step", "chunks": 4, "replicas": "auto"},
        {"objective": "step", "chunks": 4, "replicas": "by-stage"},
    ],
)
def test_every_objective_of_training_has_state_on_the_host(options: dict[str, Any]) -> None:
    request = _fitting(cluster=_cluster([2500 * MIB] * 3), **options)
    found = solve(request)
    assert found.optimizer_state == "host" and found.layer_devices
    check(request, found)
    if not found.replicas:
        assert evaluate(request, found, best=False).objective_value == pytest.approx(
            found.objective_value
        )


def test_replicas_copy_their_part_of_the_state() -> None:
    request = _fitting(cluster=_cluster([8192 * MIB] * 2), replicas="auto", chunks=2, batch_size=2)
    found = solve(request)
    assert len(found.replicas) == 1 and found.step is not None
    assert found.step.optimizer_ms == pytest.approx((2**31 / 50e6 + 2**31 / 25e6) / 2)


def _changed(placement: Placement, **fields: Any) -> Placement:
    return placement.model_copy(update=fields)


def test_the_referee_refuses_other_claims() -> None:
    request = _fitting()
    found = solve(request)
    loads = [
        load.model_copy(update={"limit_bytes": load.limit_bytes + 1}) for load in found.devices
    ]
    value = (found.objective_value or 0.0) - 1.0
    for changed, message in [
        (_changed(found, optimizer_state="device"), "'device', but 'host' was asked for"),
        (_changed(found, devices=tuple(loads)), "limit_bytes of d0"),
        (_changed(found, objective_value=value, bound=value), "objective_value"),
    ]:
        with pytest.raises(PlacementError, match=message):
            check(request, changed)


def test_the_referee_refuses_the_host_where_a_placement_fits_the_devices() -> None:
    ample = {"cluster": _cluster([8192 * MIB] * 2)}
    on_host, auto = _fitting(**ample), _fitting(**ample, optimizer_state="auto")
    found = _changed(solve(on_host), id=auto.content_hash())
    with pytest.raises(PlacementError, match="this placement meets every requirement"):
        check(auto, found)
    assert solve(auto).optimizer_state == "device"


@pytest.mark.parametrize(
    ("place", "devices", "optimizer"),
    [
        ("device", "d0 d1", "own"),
        ("host", "d0 d1", "copies"),
        ("auto", "d0 d1", "own"),
        ("device", "d0 d0", None),
        ("host", "d0 d0", "copies of both"),
        ("auto", "d0 d0", "copies of both"),
    ],
)
def test_a_map_is_judged_with_the_state_where_it_is_asked_for(
    place: str, devices: str, optimizer: str | None
) -> None:
    request = _fitting(cluster=_cluster([3300 * MIB] * 2), optimizer_state=place)
    where = dict(zip("ab", devices.split(), strict=True))
    found = evaluate(request, where, best=False)
    assert found.valid == (optimizer is not None)
    if optimizer is None:
        (fault,) = found.faults
        assert fault.kind == "out-of-memory"
        return
    copies_ms = 2**30 / 50e6 + 2**30 / 25e6
    times_ms = {"own": 1.0, "copies": copies_ms, "copies of both": 2 * copies_ms}
    assert found.objective_value == pytest.approx(6 + times_ms[optimizer])


def test_a_timeline_ends_with_the_copies() -> None:
    request = _fitting()
    shown = timeline(request, solve(request))
    copies_ms = 2**30 / 50e6 + 2**30 / 25e6
    assert [one.optimizer_ms for one in shown.devices] == pytest.approx([copies_ms] * 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"training": False, "objective": "latency", "schedule": "1f1b"}, "places inference"),
        ({"for_format": "torchtitan"}, "cannot express state on the host"),
        (
            {
                "cluster": Cluster(
                    devices=[Device(name="d0", type="t", memory_bytes=2**40)],
                )
            },
            "'d0' has no measured rates to_host and from_host",
        ),
    ],
)
def test_a_request_that_cannot_have_state_on_the_host_is_named(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        _fitting(**fields)


def test_what_does_not_run_such_a_placement_names_it() -> None:
    found = solve(_fitting())
    with pytest.raises(PlacementError, match="no optimizer state that rests on the host"):
        found.export("pipelining")
    with pytest.raises(InputError, match="which refine does not measure"):
        refine(found, nn.Linear(1, 1), None)


def test_several_processes_do_not_run_such_a_placement() -> None:
    found = solve(_fitting())
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(PlacementError, match=r"which placer\.distributed does not run"):
            build(nn.Linear(1, 1), found, torch.ones(1, 1))
    finally:
        distributed.destroy_process_group()


def test_a_placement_for_inference_has_no_optimizer_state() -> None:
    with pytest.raises(InputError, match="the placement is for inference"):
        Placement(status="unknown", objective="latency", optimizer_state="host")


def test_a_placement_of_an_earlier_version_has_state_on_the_devices() -> None:
    written = solve(_fitting(optimizer_state="device")).model_dump(mode="json")
    del written["optimizer_state"]
    assert Placement.model_validate({**written, "schema_version": "2"}).optimizer_state == "device"
