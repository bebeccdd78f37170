"""Parameters that rest off their device: every choice of small models, and the referee's rules."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from small_requests import SHARE
from tier_clusters import cluster, memory_bytes, pass_ms

from placer import GenerationOptions, Placement, PlacementRequest, Profile, solve
from placer.errors import InputError, PlacementError
from placer.report.explain import proven
from placer.schema import Cluster, Edge, Layer, TiedParameters
from placer.solver.check import check
from placer.solver.latency import host_weights
from placer_server.judge.timeline import timeline

AMPLE = 10**9
NAMES = "abcdefghijkl"


def chain(
    draw: random.Random, count: int, is_branched: bool, sizes: tuple[int, ...] = (500,)
) -> Profile:
    """A chain of layers, with a value that skips a layer if branched."""
    layers = [
        Layer(
            name=name,
            forward_ms={"t": draw.choice((0.25, 0.5, 1.0, 2.0))},
            param_bytes=draw.choice(sizes),
            buffer_bytes=draw.randrange(50),
            forward_workspace_bytes=draw.randrange(200),
        )
        for name in NAMES[:count]
    ]
    edges = [
        Edge(source=one, targets=(other,), bytes=draw.randrange(20, 90))
        for one, other in itertools.pairwise(NAMES[:count])
    ]
    if is_branched:
        edges.append(Edge(source="a", targets=("c",), bytes=40))
    return Profile(layers=tuple(layers), edges=tuple(edges))


def request(
    seed: int, count: int, devices: int, share: float, with_disk: bool = False, **fields: Any
) -> PlacementRequest:
    """A request of which all devices together hold about a share of the parameters.

    With a disk, the host holds up to a quarter of them.
    """
    draw = random.Random(seed)
    sizes = (500, 1000, 1500, 2000) if devices == 1 else (500, 550, 600)
    profile = chain(draw, count, draw.random() < 0.3, sizes)
    size = sum(layer.param_bytes for layer in profile.layers)
    rate = draw.choice((5e5, 2e6, 1e7))
    options: dict[str, Any] = {"objective": "latency", "host_memory_bytes": AMPLE, **fields}
    disk = None
    if with_disk:
        disk = draw.choice((3e5, 1e6, 5e6))
        options |= {"host_memory_bytes": draw.choice((None, 600, size // 4)), "disk_bytes": AMPLE}
    return PlacementRequest(
        profile=profile,
        cluster=cluster(devices, int(share * size / devices) + 500, rate, disk),
        **options,
    )


def maps(asked: PlacementRequest) -> Iterator[dict[str, str]]:
    """Every map of the layers in which each device has one run of layers."""
    names = [layer.name for layer in asked.profile.layers]
    for choice in itertools.product([device.name for device in asked.devices], repeat=len(names)):
        runs = [device for device, _ in itertools.groupby(choice)]
        if len(set(runs)) == len(runs):
            yield dict(zip(names, choice, strict=True))


def best(asked: PlacementRequest, may_rest: bool = True) -> float | None:
    """The shortest pass of all maps with all sets of resting layers; None if none fits."""
    layers = asked.profile.layers
    found = []
    names = [layer.name for layer in layers]
    tiers = [""]
    if may_rest:
        limits = {"host": asked.host_memory_bytes, "disk": asked.disk_bytes}
        tiers += [tier for tier, limit in limits.items() if limit is not None]
    choices = [
        {name: tier for name, tier in zip(names, choice, strict=True) if tier}
        for choice in itertools.product(tiers, repeat=len(names))
    ]
    sizes = {layer.name: layer.param_bytes for layer in layers}
    # all devices are of one host
    choices = [
        choice
        for choice in choices
        if sum(sizes[name] for name, tier in choice.items() if tier == "host")
        <= (asked.host_memory_bytes or 0)
    ]
    for where in maps(asked):
        held = {
            device: [layer for layer in layers if where[layer.name] == device.name]
            for device in asked.devices
        }
        for resting in choices:
            if all(
                memory_bytes(asked, own, resting) <= device.usable_bytes
                for device, own in held.items()
            ):
                found.append(pass_ms(asked, where, resting))
    return min(found, default=None)


CASES = [
    (seed, 1 + seed % 2, share) for seed in range(math.ceil(40 * SHARE)) for share in (0.5, 0.75)
]


@pytest.mark.parametrize("seed, devices, share", CASES)
def test_small_requests_have_the_best_of_all_maps_and_resting_layers(seed, devices, share):
    asked = request(seed, 6, devices, share)
    plain = best(asked, may_rest=False)
    expected = plain if plain is not None else best(asked)
    found = solve(asked)
    if expected is None:
        assert found.status == "infeasible"
        return
    assert found.objective_value == pytest.approx(expected)
    assert found.status == "optimal"
    assert bool(found.resting) == (plain is None)


@pytest.mark.parametrize("seed, devices, share", CASES)
def test_small_requests_have_the_best_choice_of_host_and_disk(seed, devices, share, monkeypatch):
    monkeypatch.setattr(host_weights, "FEW", 100_000)
    asked = request(seed, 5, devices, share, with_disk=True)
    plain = best(asked, may_rest=False)
    expected = plain if plain is not None else best(asked)
    found = solve(asked)
    if expected is None:
        assert found.status == "infeasible"
        return
    assert found.objective_value == pytest.approx(expected)
    assert found.status == "optimal"


@pytest.mark.parametrize("count, with_disk", [(7, False), (6, True)])
@pytest.mark.parametrize("seed, devices, share", CASES)
def test_the_search_is_near_the_best_and_its_bound_below(
    seed, devices, share, count, with_disk, monkeypatch
):
    asked = request(seed, count, devices, share, with_disk=with_disk)
    if best(asked, may_rest=False) is not None:
        return
    expected = best(asked)
    monkeypatch.setattr(host_weights, "FEW", 0)
    found = solve(asked)
    if expected is None:
        assert not found.layer_devices
        return
    assert found.bound is not None and found.bound <= expected * (1 + 1e-9)
    assert found.objective_value is not None
    assert expected * (1 - 1e-9) <= found.objective_value <= 1.1 * expected


def simple(count: int = 6, **fields: Any) -> PlacementRequest:
    """Layers of 500 bytes on a device for 1600 bytes of them, which the host copies in 1.1 ms."""
    layers = [Layer(name=n, forward_ms={"t": 1.0}, param_bytes=500) for n in NAMES[:count]]
    edges = [Edge(source=a, targets=(b,), bytes=10) for a, b in itertools.pairwise(NAMES[:count])]
    options: dict[str, Any] = {
        "objective": "latency",
        "host_memory_bytes": AMPLE,
        "cluster": cluster(1, 1600, rate=5e5),
        **fields,
    }
    profile = options.pop("profile", Profile(layers=tuple(layers), edges=tuple(edges)))
    return PlacementRequest(profile=profile, **options)


def test_copies_run_while_other_layers_compute():
    """Two buffers and one layer stay: five copies of 1.1 ms; the last layer waits for the last."""
    found = solve(simple())
    assert len(found.resting) == 5 and set(found.resting.values()) == {"host"}
    assert found.objective_value == pytest.approx(5 * 1.1 + 1.0)
    (load,) = found.devices
    assert (load.memory.param_bytes, load.resting_bytes) == (3 * 500, 5 * 500)
    assert load.streaming_ms == pytest.approx(5.5)
    assert load.memory.total_bytes <= load.limit_bytes == 1600


def test_nothing_rests_where_the_model_fits():
    found = solve(simple(3))
    assert found.resting == {} and found.objective_value == pytest.approx(3.0)


def test_two_large_layers_need_as_much_memory_in_buffers():
    assert solve(simple(4, cluster=cluster(1, 999, rate=5e5))).status == "infeasible"
    assert len(solve(simple(4, cluster=cluster(1, 1020, rate=5e5))).resting) == 4


@pytest.mark.parametrize("limit, fits", [(5 * 500, True), (5 * 500 - 1, False)])
def test_the_parameters_of_a_host_keep_within_its_limit(limit, fits):
    found = solve(simple(host_memory_bytes=limit))
    assert bool(found.layer_devices) == fits
    if not fits:
        assert found.infeasible is not None
        assert "of host memory for parameters do not suffice" in found.infeasible.reason


def with_disk(**fields: Any) -> PlacementRequest:
    """``simple`` with a host for two layers, and a disk that takes 2.4 ms for one."""
    devices = cluster(1, 1600, rate=5e5, disk=2.5e5)
    return simple(**{"cluster": devices, "host_memory_bytes": 1000, "disk_bytes": AMPLE, **fields})


def test_only_what_the_host_has_no_memory_for_rests_on_its_disk():
    """Two copies of 1.1 ms and three of 2.4 ms, and the last layer waits for the last copy."""
    found = solve(with_disk())
    assert Counter(found.resting.values()) == {"host": 2, "disk": 3}
    assert found.objective_value == pytest.approx(2 * 1.1 + 3 * 2.4 + 1.0)
    assert found.bound == pytest.approx(found.objective_value)
    (load,) = found.devices
    assert (load.resting_bytes, load.disk_bytes) == (2500, 1500)
    assert load.streaming_ms == pytest.approx(2 * 1.1 + 3 * 2.4)
    assert set(solve(with_disk(host_memory_bytes=AMPLE)).resting.values()) == {"host"}
    assert set(solve(with_disk(host_memory_bytes=None)).resting.values()) == {"disk"}


def test_what_rests_on_the_disk_is_spread_evenly(monkeypatch):
    """The host has four of sixteen layers, and no two of these follow one another."""
    monkeypatch.setattr(host_weights._Search, "_improve", lambda search: None)
    layers = [Layer(name=f"l{n:02}", forward_ms={"t": 1.0}, param_bytes=500) for n in range(18)]
    edges = [
        Edge(source=a.name, targets=(b.name,), bytes=10) for a, b in itertools.pairwise(layers)
    ]
    profile = Profile(layers=tuple(layers), edges=tuple(edges))
    found = solve(with_disk(profile=profile, host_memory_bytes=2000))
    tiers = [*found.resting.values()]
    assert Counter(tiers) == {"disk": 13, "host": 4}
    assert ["host", "host"] not in [[*pair] for pair in itertools.pairwise(tiers)]


@pytest.mark.parametrize("limit, fits", [(3 * 500, True), (3 * 500 - 1, False)])
def test_the_parameters_on_a_disk_keep_within_its_limit(limit, fits):
    found = solve(with_disk(disk_bytes=limit))
    assert bool(found.layer_devices) == fits
    if not fits:
        assert found.infeasible is not None
        assert "1000 B of host memory and 1.5 KiB of disk space" in found.infeasible.reason


def test_without_a_rate_of_the_disk_nothing_rests_there():
    found = solve(with_disk(cluster=cluster(1, 1600, rate=5e5), host_memory_bytes=None))
    assert found.infeasible is not None
    assert "no device has a measured rate from the host's disk" in found.infeasible.reason


def test_each_host_has_a_limit_of_its_own():
    devices = cluster(2, 1600, rate=5e5)
    for host, fits in (("one", False), ("other", True)):
        hosts = [devices.devices[0].model_copy(update={"host": "one"})]
        hosts += [devices.devices[1].model_copy(update={"host": host})]
        named = devices.model_copy(update={"devices": tuple(hosts)})
        found = solve(simple(12, cluster=named, host_memory_bytes=5 * 500))
        assert bool(found.layer_devices) == fits


def test_a_device_without_a_measured_rate_keeps_all_parameters():
    devices = cluster(1, 1600)
    plain = devices.devices[0].model_copy(update={"from_host": None})
    found = solve(simple(cluster=Cluster(devices=(plain,))))
    assert (
        found.infeasible is not None and "no device has a measured rate" in found.infeasible.reason
    )


@pytest.mark.parametrize("kind", ["tied", "called twice"])
def test_parameters_of_several_layers_stay_on_their_device(kind):
    asked = simple()
    layers, edges = list(asked.profile.layers), list(asked.profile.edges)
    ties: list[TiedParameters] = []
    if kind == "tied":
        ties = [TiedParameters(layers=("a", "f"), gradient_bytes=8, split=True)]
    else:
        layers.append(layers[0].model_copy(update={"name": "a@1", "param_bytes": 0}))
        edges.append(Edge(source="f", targets=("a@1",), bytes=10))
    profile = asked.profile.model_copy(
        update={"layers": tuple(layers), "edges": tuple(edges), "tied": tuple(ties)}
    )
    found = solve(simple(profile=profile, cluster=cluster(1, 2100, rate=5e5)))
    assert found.resting and "a" not in found.resting
    moved = {"a": "host", **{name: "host" for name in list(found.resting)[1:]}}
    with pytest.raises(PlacementError):
        check(asked_again(found, profile), found.model_copy(update={"resting": moved}))


def asked_again(found: Placement, profile: Profile) -> PlacementRequest:
    """Return the request of a placement of ``simple``."""
    asked = simple(profile=profile, cluster=cluster(1, 2100, rate=5e5))
    assert asked.content_hash() == found.id
    return asked


def generating(**options: Any) -> dict[str, Any]:
    """The fields of a request for three new tokens, whose later passes are ten times as short."""
    layers = [
        Layer(name=n, forward_ms={"t": 0.1}, param_bytes=500, buffer_bytes=5) for n in NAMES[:6]
    ]
    token = simple().profile.model_copy(update={"layers": tuple(layers)})
    asked = GenerationOptions(prompt_tokens=8, new_tokens=3, **options)
    return {"objective": "generation", "token_profile": token, "generation": asked}


def test_a_generation_adds_up_passes_with_their_copies():
    """The prompt takes 5 copies and the last layer, as does each token, with its shorter layer."""
    found = solve(simple(**generating(), cluster=cluster(1, 1630, rate=5e5)))
    assert len(found.resting) == 5 and found.generation is not None
    assert found.generation.first_token_ms == pytest.approx(5 * 1.1 + 1.0)
    assert found.generation.token_ms == pytest.approx(5 * 1.1 + 0.1)
    assert found.objective_value == pytest.approx(6.5 + 2 * 5.6)
    assert found.devices[0].memory.cache_bytes == 30


@pytest.mark.parametrize(
    "changed",
    [
        {"objective_value": 6.0, "bound": 6.0, "gap": 0.0},
        {"resting": {}},
        {"resting": dict.fromkeys("abcde", "host")},
    ],
)
def test_the_referee_refuses_other_claims(changed):
    asked = simple()
    found = solve(asked)
    assert set(found.resting) != set("abcde")
    with pytest.raises(PlacementError):
        check(asked, found.model_copy(update=changed))


def test_the_referee_refuses_false_claims_about_the_disk():
    found = solve(with_disk())
    on_disk = {**found.resting, **dict.fromkeys(list(found.resting), "disk")}
    load = found.devices[0]
    with pytest.raises(PlacementError, match="disk_bytes of d0"):
        check(with_disk(), found.model_copy(update={"resting": on_disk}))
    slower = load.model_copy(update={"disk_bytes": 2500, "streaming_ms": 5 * 2.4})
    changed = found.model_copy(update={"resting": on_disk, "devices": (slower,)})
    with pytest.raises(PlacementError, match="objective_value"):
        check(with_disk(), changed)
    plain = simple(cluster=cluster(1, 1600, rate=5e5, disk=2.5e5))
    same_id = found.model_copy(update={"id": plain.content_hash()})
    with pytest.raises(PlacementError, match="rest on the disk, which was not asked for"):
        check(plain, same_id)
    small = with_disk(disk_bytes=1499)
    same_id = found.model_copy(update={"id": small.content_hash()})
    with pytest.raises(PlacementError, match="1500 bytes rest on the disk of host ''; the limit"):
        check(small, same_id)


@pytest.mark.parametrize(
    "fields, because",
    [
        ({"objective": "throughput"}, "the objective is 'throughput'"),
        (generating(sequences_in_flight=2), "2 sequences are in flight"),
        ({"for_format": "vllm"}, "format 'vllm' cannot express it"),
    ],
)
def test_host_memory_is_refused_where_nothing_may_rest(fields, because):
    with pytest.raises(InputError, match=f"host_memory_bytes: .*{because}"):
        simple(**fields)
    with pytest.raises(InputError, match=f"disk_bytes: .*{because}: leave disk_bytes out"):
        simple(**fields, host_memory_bytes=None, disk_bytes=1)


def test_reports_and_timelines_count_the_copies():
    asked = simple()
    found = solve(asked)
    assert "parameters of 5 layers, copied in each pass: d0 2.4 KiB in 5.50 ms" in "\n".join(
        proven(found)
    )
    assert timeline(asked, found).step_ms == pytest.approx(6.5)
    found = solve(with_disk())
    assert "d0 2.4 KiB in 9.40 ms, 1.5 KiB of them from the disk" in "\n".join(proven(found))
    assert timeline(with_disk(), found).step_ms == pytest.approx(10.4)


def test_other_engines_learn_of_resting_parameters_or_are_refused():
    found = solve(simple())
    offloaded = dict.fromkeys(found.resting, "cpu")
    assert {**found.device_map(), **offloaded} == found.device_map()
    assert set(found.device_map().values()) == {"cpu", "d0"}
    assert set(solve(with_disk()).device_map().values()) == {"cpu", "disk", "d0"}
    with pytest.raises(PlacementError, match="format 'vllm' has no parameters that rest"):
        found.export("vllm")
