"""Mixtures whose experts rest off their device: copies of chosen experts, by every choice."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from small_requests import SHARE
from tier_clusters import cluster

from placer import GenerationOptions, PlacementRequest, Profile, solve
from placer.errors import InputError, PlacementError
from placer.schema import Cluster, Edge, Layer, base
from placer.solver.check import check
from placer.solver.latency import host_weights

NAMES = "abcdefgh"
AMPLE = 10**9


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen experts alone are copied from 600 bytes of resting experts on."""
    monkeypatch.setattr(base, "LEAST_EXPERT_BYTES", 600)


def passes(layers: list[Layer], token_share: float, token_ms: float) -> dict[str, Profile]:
    """The profiles of a prompt's pass, of these layers in a chain, and of a token's pass."""
    names = [layer.name for layer in layers]
    edges = tuple(Edge(source=a, targets=(b,), bytes=10) for a, b in itertools.pairwise(names))
    changed = {"forward_ms": {"t": token_ms}, "expert_share": token_share}
    token = tuple(layer.model_copy(update=changed) for layer in layers)
    return {
        "profile": Profile(layers=tuple(layers), edges=edges),
        "token_profile": Profile(layers=token, edges=edges),
    }


def request(
    layers: list[Layer], placed_on: Cluster, token_share: float = 0.25, **fields: Any
) -> PlacementRequest:
    """A generation of three tokens, whose later passes take 0.1 ms for a layer."""
    options: dict[str, Any] = {
        "objective": "generation",
        "generation": GenerationOptions(prompt_tokens=8, new_tokens=3),
        "host_memory_bytes": AMPLE,
        "cluster": placed_on,
        **passes(layers, token_share, 0.1),
        **fields,
    }
    return PlacementRequest(**options)


def mixed(name: str, share: float = 1.0, expert_bytes: int = 400) -> Layer:
    """A layer of 500 bytes and 1 ms, with experts."""
    return Layer(
        name=name,
        forward_ms={"t": 1.0},
        param_bytes=500,
        expert_bytes=expert_bytes,
        expert_share=share,
    )


def test_a_pass_copies_other_parameters_ahead_and_chosen_experts_while_it_runs() -> None:
    """All six layers rest. The link of 500 bytes per ms takes 0.1 ms for each copy, in addition.

    A layer takes its copy of 100 bytes, 0.3 ms, its chosen experts, and its forward: the copy of
    the next layer begins when the layer before is over, and delays the experts.
    """
    found = solve(request([mixed(name) for name in NAMES[:6]], cluster(1, 1020, rate=5e5)))
    assert len(found.resting) == 6 and found.generation is not None
    prompt_ms = 6 * (0.3 + (0.1 + 0.8) + 1.0)
    token_ms = 6 * (0.3 + (0.1 + 0.2) + 0.1)
    assert found.generation.first_token_ms == pytest.approx(prompt_ms)
    assert found.generation.token_ms == pytest.approx(token_ms)
    assert found.objective_value == pytest.approx(prompt_ms + 2 * token_ms)
    (load,) = found.devices
    assert (load.resting_bytes, load.memory.param_bytes) == (3000, 2 * 500)
    # of a mean pass
    assert load.streaming_ms == pytest.approx(6 * (0.3 + 0.1 + (0.8 + 2 * 0.2) / 3))


def test_few_bytes_of_experts_are_copied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "LEAST_EXPERT_BYTES", 6 * 400 + 1)
    found = solve(request([mixed(name) for name in NAMES[:6]], cluster(1, 1020, rate=5e5)))
    assert found.generation is not None
    # six copies of 1.1 ms, and the last layer
    assert found.generation.token_ms == pytest.approx(6 * 1.1 + 0.1)


def test_a_model_without_experts_has_the_times_of_whole_copies() -> None:
    plain = [mixed(name, expert_bytes=0) for name in NAMES[:6]]
    found = solve(request(plain, cluster(1, 1020, rate=5e5)))
    assert found.generation is not None
    assert found.generation.token_ms == pytest.approx(6 * 1.1 + 0.1)
    assert '"expert' not in Profile(layers=tuple(plain)).model_dump_json(exclude_defaults=True)


def pass_ms(profile: Profile, asked: PlacementRequest, where: Any, resting: Any) -> float:
    """The time of a pass: each event ends its duration after the events that it waits for."""
    layers = {layer.name: layer for layer in profile.layers}
    devices = {device.name: device for device in asked.devices}
    links = {(link.source, link.target): link for link in asked.placed_on.links}
    by_choice = sum(layers[name].expert_bytes for name in resting) >= base.LEAST_EXPERT_BYTES
    waits: dict[tuple[str, str], list[tuple[tuple[str, str], float]]] = {}
    lasts: dict[tuple[str, str], float] = {}

    def copying(name: str, size: float) -> float:
        device = devices[where[name]]
        assert device.from_host is not None
        rates = [device.from_host] + ([device.from_disk] if resting[name] == "disk" else [])
        slowest = min(rate.bandwidth_bytes_per_s for rate in rates)
        return 1e3 * (sum(rate.latency_s for rate in rates) + size / slowest)

    for name, layer in layers.items():
        lasts["run", name] = layer.forward_ms["t"]
        waits["run", name] = [
            (("run", other), 0.0)
            for other in layers
            if other < name and where[other] == where[name]
        ]
        for edge in profile.edges:
            if name in edge.targets:
                ends = where[edge.source], where[name]
                delay = links[ends].transfer_ms(edge.bytes) if ends[0] != ends[1] else 0.0
                waits["run", name].append((("run", edge.source), delay))
    for device in devices:
        own = sorted(name for name in resting if where[name] == device)
        transfers: list[tuple[str, str]] = [("copy", name) for name in own[:1]]
        for place, name in enumerate(own):
            layer, is_split = layers[name], by_choice and layers[name].expert_bytes > 0
            before = [*waits["run", name]]
            size = layer.param_bytes - (layer.expert_bytes if is_split else 0)
            lasts["copy", name] = copying(name, size)
            waits["copy", name] = [(("run", one), 0.0) for one in own[: place - 1] if place > 1]
            waits["run", name].append((("copy", name), 0.0))
            transfers += [("copy", later) for later in own[place + 1 : place + 2]]
            if is_split:
                lasts["pick", name] = copying(name, layer.expert_share * layer.expert_bytes)
                waits["pick", name] = [*before, (("copy", name), 0.0)]
                waits["run", name].append((("pick", name), 0.0))
                transfers.append(("pick", name))
        for one, other in itertools.combinations(transfers, 2):
            waits[other].append((one, 0.0))
    ends_at: dict[tuple[str, str], float] = {}

    def end(event: tuple[str, str]) -> float:
        if event not in ends_at:
            begin = max((end(one) + delay for one, delay in waits[event]), default=0.0)
            ends_at[event] = begin + lasts[event]
        return ends_at[event]

    return max(end(("run", name)) for name in layers)


def drawn(seed: int, count: int, devices: int, with_disk: bool) -> PlacementRequest:
    """A request of some layers with experts, for devices with about half of the memory."""
    draw = random.Random(seed)
    layers = [
        Layer(
            name=name,
            forward_ms={"t": draw.choice((0.25, 1.0, 2.0))},
            param_bytes=500,
            expert_bytes=draw.choice((0, 300, 450)),
            expert_share=draw.choice((0.3, 0.9, 1.0)),
        )
        for name in NAMES[:count]
    ]
    memory = max(1100, int(draw.choice((0.5, 0.75)) * 500 * count / devices) + 500)
    rate = draw.choice((5e5, 2e6))
    disk, fields = None, {}
    if with_disk:
        disk = draw.choice((3e5, 1e6))
        fields = {"host_memory_bytes": draw.choice((None, 1000)), "disk_bytes": AMPLE}
    share = draw.choice((0.1, 0.4))
    return request(layers, cluster(devices, memory, rate, disk), share, **fields)


def best(asked: PlacementRequest) -> tuple[float | None, bool]:
    """The shortest generation of all maps and choices, and whether something must rest."""
    names = [layer.name for layer in asked.profile.layers]
    limits = {"host": asked.host_memory_bytes, "disk": asked.disk_bytes}
    tiers = ["", *(tier for tier, limit in limits.items() if limit is not None)]
    found: dict[bool, list[float]] = {True: [], False: []}
    assert asked.token_profile is not None
    for places in itertools.product([device.name for device in asked.devices], repeat=len(names)):
        runs = [device for device, _ in itertools.groupby(places)]
        if len(set(runs)) < len(runs):
            continue
        where = dict(zip(names, places, strict=True))
        for choice in itertools.product(tiers, repeat=len(names)):
            resting = {name: tier for name, tier in zip(names, choice, strict=True) if tier}
            if _fits(asked, where, resting):
                first_ms, token_ms = (
                    pass_ms(one, asked, where, resting)
                    for one in (asked.profile, asked.token_profile)
                )
                found[bool(resting)].append(first_ms + 2 * token_ms)
    if found[False]:
        return min(found[False]), False
    return min(found[True], default=None), True


def _fits(asked: PlacementRequest, where: dict[str, str], resting: dict[str, str]) -> bool:
    """Whether layers of 500 bytes fit their devices, with two buffers, and the host."""
    if 500 * sum(tier == "host" for tier in resting.values()) > (asked.host_memory_bytes or 0):
        return False
    for device in asked.devices:
        own = [name for name in where if where[name] == device.name]
        rests = sum(name in resting for name in own)
        # values of 10 bytes: at most what a layer reads and what it makes, at one time
        crossing = {name for name in own if name != NAMES[0]}
        crossing |= {NAMES[NAMES.index(name) + 1] for name in own if name != [*where][-1]}
        live = 0
        for name in own:
            ends = [name in crossing, NAMES[NAMES.index(name) + 1] in crossing]
            live = max(live, 10 * sum(ends))
        if 500 * (len(own) - rests) + (1000 if rests else 0) + live > device.usable_bytes:
            return False
    return True


CASES = [(seed, 1 + seed % 2, seed % 3 == 0) for seed in range(math.ceil(40 * SHARE))]


@pytest.mark.parametrize("seed, devices, with_disk", CASES)
def test_small_mixtures_have_the_best_of_all_maps_and_choices(
    seed: int, devices: int, with_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_weights, "FEW", 100_000)
    asked = drawn(seed, 5, devices, with_disk)
    expected, is_resting = best(asked)
    found = solve(asked)
    if expected is None:
        assert not found.layer_devices
        return
    assert found.objective_value == pytest.approx(expected)
    assert bool(found.resting) == is_resting


@pytest.mark.parametrize("seed, devices, with_disk", CASES)
def test_the_search_keeps_its_bound_below_the_best(
    seed: int, devices: int, with_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = drawn(seed, 5, devices, with_disk)
    expected, is_resting = best(asked)
    if expected is None or not is_resting:
        return
    monkeypatch.setattr(host_weights, "FEW", 0)
    found = solve(asked)
    assert found.bound is not None and found.bound <= expected * (1 + 1e-9)
    assert found.objective_value is not None
    assert expected * (1 - 1e-9) <= found.objective_value <= 1.15 * expected


def test_layers_with_experts_rest_rather_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of twelve layers have experts, which cost a token a tenth of the copies."""
    monkeypatch.setattr(host_weights, "FEW", 0)
    layers = [mixed(f"l{n:02}", 1.0, 490 if n % 2 else 0) for n in range(12)]
    asked = request(
        layers,
        cluster(1, 4600, rate=5e5),
        0.1,
        generation=GenerationOptions(prompt_tokens=8, new_tokens=100),
    )
    found = solve(asked)
    assert found.resting and all(int(name[1:]) % 2 for name in found.resting)


@pytest.mark.parametrize("name", ["first_token_ms", "token_ms"])
def test_the_referee_refuses_times_of_whole_copies(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request([mixed(name) for name in NAMES[:6]], cluster(1, 1020, rate=5e5))
    found = solve(asked)
    with monkeypatch.context() as patched:
        patched.setattr(base, "LEAST_EXPERT_BYTES", AMPLE)
        whole = solve(asked)
    assert found.generation is not None and whole.generation is not None
    other = found.generation.model_copy(update={name: getattr(whole.generation, name)})
    with pytest.raises(PlacementError, match=name):
        check(asked, found.model_copy(update={"generation": other}))


def _less(layer: Layer) -> Layer:
    return layer.model_copy(update={"expert_bytes": 100})


@pytest.mark.parametrize(
    "ask, message",
    [
        (
            lambda: Profile(layers=(mixed("a", expert_bytes=501),)),
            "'a' has 501 bytes of experts and 500 bytes of parameters",
        ),
        (
            lambda: PlacementRequest(
                profile=Profile(layers=(mixed("a"),)),
                cluster=cluster(1, 1000, 5e5),
                objective="latency",
                host_memory_bytes=AMPLE,
            ),
            "only the passes of a generation copy the chosen ones alone",
        ),
        (
            lambda: request(
                [mixed("a")],
                cluster(1, 1000, 5e5),
                token_profile=Profile(layers=(_less(mixed("a")),)),
            ),
            "'a' has 100 bytes of experts, and 400 in the prompt's profile",
        ),
    ],
)
def test_contradictions_about_experts_are_refused(ask: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ask()
