"""Objective ``generation``: every placement of small chains, and what the referee refuses."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from placer import GenerationOptions, Placement, PlacementRequest, Profile, evaluate, solve
from placer.errors import InputError, PlacementError
from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link
from placer.solver.check import check
from placer.solver.latency.generation import mean_pass, passes_of
from placer_server.judge.timeline import timeline

NAMES = ("a", "b", "c", "d")
AMPLE = 10**9


def cluster(count: int, memory_bytes: int = AMPLE) -> Cluster:
    devices = [
        Device(name=f"d{n}", type=f"t{n % 2}", memory_bytes=memory_bytes) for n in range(count)
    ]
    links = [
        Link(source=one.name, target=other.name, bandwidth_bytes_per_s=1e6, latency_s=2e-4)
        for one, other in itertools.permutations(devices, 2)
    ]
    return Cluster(devices=tuple(devices), links=tuple(links))


def chain(
    draw: random.Random, scale: int, cache: bool, devices: Cluster | None, **fields: Any
) -> Profile:
    """A chain whose times and values are about ``scale`` times as large as for one token."""
    layers = [
        Layer(
            name=name,
            forward_ms={kind: scale * draw.uniform(1, 4) for kind in ("t0", "t1")},
            param_bytes=1000 + 10 * number,
            buffer_bytes=7 + (100 + 50 * number if cache else 0),
            forward_workspace_bytes=draw.randrange(100) * (1 if cache else 3),
        )
        for number, name in enumerate(NAMES)
    ]
    edges = [
        # a multiple of the new tokens, so that means are whole numbers
        Edge(source=one, targets=(other,), bytes=12 * scale * draw.randrange(1, 40))
        for one, other in itertools.pairwise(NAMES)
    ]
    return Profile(layers=tuple(layers), edges=tuple(edges), cluster=devices, **fields)


def request(
    seed: int = 1,
    flight: int = 1,
    devices: int = 2,
    new_tokens: int = 6,
    memory_bytes: int = AMPLE,
    **fields: Any,
) -> PlacementRequest:
    draw = random.Random(seed)
    options = GenerationOptions(prompt_tokens=9, new_tokens=new_tokens, sequences_in_flight=flight)
    return PlacementRequest(
        profile=chain(draw, 5, False, cluster(devices, memory_bytes), batch_size=2),
        token_profile=chain(draw, 1, True, None, batch_size=2),
        objective="generation",
        generation=options,
        **fields,
    )


def maps(asked: PlacementRequest) -> Iterator[dict[str, str]]:
    """Every map of the chain in which each device has one run of layers."""
    for choice in itertools.product([d.name for d in asked.devices], repeat=len(NAMES)):
        runs = [device for device, _ in itertools.groupby(choice)]
        if len(set(runs)) == len(runs):
            yield dict(zip(NAMES, choice, strict=True))


def pass_times(
    asked: PlacementRequest, profile: Profile, where: dict[str, str]
) -> tuple[float, dict[str, float]]:
    """The latency of a pass, and the load of each device."""
    kinds = {device.name: device.type for device in asked.devices}
    loads = dict.fromkeys(kinds, 0.0)
    latency = 0.0
    for layer in profile.layers:
        time_ms = layer.forward_ms[kinds[where[layer.name]]]
        loads[where[layer.name]] += time_ms
        latency += time_ms
    for edge in profile.edges:
        ends = where[edge.source], where[edge.targets[0]]
        if ends[0] != ends[1]:
            time_ms = 0.2 + edge.bytes / 1e3
            latency += time_ms
            for end in ends:
                loads[end] += time_ms
    return latency, loads


def value(asked: PlacementRequest, where: dict[str, str]) -> float:
    """The time between the ends of two generations, from both passes apart."""
    token, options = asked.token_profile, asked.generation
    assert token is not None and options is not None
    first, first_loads = pass_times(asked, asked.profile, where)
    later, later_loads = pass_times(asked, token, where)
    count, flight = options.new_tokens, options.sequences_in_flight
    whole = first + (count - 1) * later
    if flight == 1:
        return whole
    busiest = max(first_loads[d] + (count - 1) * later_loads[d] for d in first_loads)
    return max(busiest, whole / flight)


def memory(asked: PlacementRequest, where: dict[str, str], device: str) -> int:
    """The bytes of a device: weights, the cache of all sequences, and the larger pass."""
    token, options = asked.token_profile, asked.generation
    assert token is not None and options is not None
    state, peak = 0, 0
    held = [
        max(one.bytes, other.bytes)
        for one, other in zip(asked.profile.edges, token.edges, strict=True)
    ]
    for number, (first, later) in enumerate(zip(asked.profile.layers, token.layers, strict=True)):
        if where[first.name] != device:
            continue
        state += first.param_bytes + first.buffer_bytes
        state += options.sequences_in_flight * (later.buffer_bytes - first.buffer_bytes)
        workspace = max(first.forward_workspace_bytes, later.forward_workspace_bytes)
        peak = max(peak, workspace + sum(held[max(0, number - 1) : number + 1]))
    return state + peak


def best(asked: PlacementRequest) -> float | None:
    found = [
        value(asked, where)
        for where in maps(asked)
        if all(memory(asked, where, one.name) <= one.usable_bytes for one in asked.devices)
    ]
    return min(found, default=None)


@pytest.mark.covering
@pytest.mark.parametrize("memory_bytes", [AMPLE, 7000, 6000])
@pytest.mark.parametrize(("flight", "devices"), [(1, 2), (1, 3), (2, 2), (3, 3), (5, 2)])
def test_no_placement_is_better_if_one_sequence_or_as_many_as_devices_are_in_flight(
    flight: int, devices: int, memory_bytes: int
) -> None:
    for seed in range(4):
        asked = request(seed, flight, devices, memory_bytes=memory_bytes)
        found, known = solve(asked), best(asked)
        if known is None:
            assert found.status == "infeasible"
            continue
        assert found.status == "optimal"
        assert found.objective_value == pytest.approx(known, rel=2e-6)


def test_with_fewer_sequences_than_devices_the_bound_holds_and_the_best_is_near() -> None:
    for seed in range(6):
        asked = request(seed, flight=2, devices=3)
        found, known = solve(asked), best(asked)
        assert known is not None and found.bound is not None and found.objective_value is not None
        assert found.bound <= known * (1 + 1e-9)
        assert known * (1 - 1e-9) <= found.objective_value <= 1.1 * known


def test_the_memory_of_each_device_has_the_cache_of_all_sequences_apart() -> None:
    asked = request(flight=3, constraints=Constraints(pinned={"a": "d0", "c": "d1"}))
    found = solve(asked)
    for load in found.devices:
        mine = [n for n, name in enumerate(NAMES) if found.layer_devices[name] == load.device]
        assert load.memory.cache_bytes == 3 * sum(100 + 50 * number for number in mine)
        assert load.memory.buffer_bytes == 7 * len(mine)
        assert load.memory.total_bytes == memory(asked, found.layer_devices, load.device)


def test_a_mean_pass_is_computed_by_hand() -> None:
    def two(first_ms: float, sent: int, buffers: int, workspace: int) -> Profile:
        layers = [
            Layer(
                name=name,
                forward_ms={"t0": first_ms},
                buffer_bytes=buffers,
                forward_workspace_bytes=workspace,
            )
            for name in ("a", "b")
        ]
        edge = Edge(source="a", targets=("b",), bytes=sent)
        return Profile(layers=tuple(layers), edges=(edge,), cluster=cluster(1))

    mask = Edge(source="a", targets=("b",), bytes=9)  # of the prompt's pass alone
    prompt = two(10.0, 100, 1, 50)
    prompt = prompt.model_copy(update={"edges": (*prompt.edges, mask)})
    asked = PlacementRequest(
        profile=prompt,
        token_profile=two(2.0, 10, 21, 60),
        objective="generation",
        generation=GenerationOptions(prompt_tokens=10, new_tokens=4, sequences_in_flight=2),
    )
    mean = mean_pass(passes_of(asked))
    assert [layer.forward_ms["t0"] for layer in mean.layers] == [4.0, 4.0]  # (10 + 3 * 2) / 4
    assert [edge.bytes for edge in mean.edges] == [33, 3]  # (100 + 30) / 4 and 9 / 4, rounded up
    assert [layer.buffer_bytes for layer in mean.layers] == [41, 41]  # 1 + 2 * 20
    # 60, and what the prompt's values have beyond the mean: 100 - 33 + 9 - 3
    assert [layer.forward_workspace_bytes for layer in mean.layers] == [133, 133]


def test_the_times_of_the_passes_are_reported() -> None:
    asked = request(flight=2)
    found = solve(asked)
    report, token = found.generation, asked.token_profile
    assert report is not None and token is not None and found.objective_value is not None
    first, _ = pass_times(asked, asked.profile, found.layer_devices)
    later, _ = pass_times(asked, token, found.layer_devices)
    assert report.first_token_ms == pytest.approx(first)
    assert report.token_ms == pytest.approx(later)
    assert report.generation_ms == pytest.approx(2 * found.objective_value)
    assert report.tokens_per_s == pytest.approx(2 * 6 * 1000 / found.objective_value)
    assert report.prompt_tokens == 9


def test_a_single_new_token_is_the_latency_of_the_prompts_pass() -> None:
    asked = request(new_tokens=1)
    found = solve(asked)
    alone = solve(PlacementRequest(profile=asked.profile, objective="latency"))
    assert found.objective_value == pytest.approx(alone.objective_value)
    assert found.generation is not None and found.generation.token_ms is None


def test_more_sequences_than_memory_has_room_for_have_no_placement() -> None:
    asked = request(flight=1, memory_bytes=7000)
    assert solve(asked).layer_devices
    found = solve(request(flight=20, memory_bytes=7000))
    assert found.status == "infeasible"
    assert found.infeasible is not None and found.infeasible.missing_bytes > 0
    assert found.objective == "generation" and found.generation is None


def _alone_ms(asked: PlacementRequest, device: Device) -> float:
    """The time of a generation with all layers on one device."""
    token = asked.token_profile
    assert token is not None
    first, later = (
        sum(layer.forward_ms[device.type] for layer in one.layers) for one in (asked.profile, token)
    )
    return first + 5 * later


def test_copies_are_on_the_quickest_devices_one_for_each_sequence() -> None:
    asked = request(flight=2, devices=3)
    found = solve(asked).generation
    assert found is not None
    times = {device.name: _alone_ms(asked, device) for device in asked.devices}
    quickest = sorted(times, key=times.__getitem__)[:2]
    assert set(found.copies) == set(quickest)
    # 2 sequences of 6 new tokens on each
    assert found.copies_tokens_per_s == pytest.approx(
        sum(12 * 1000 / times[name] for name in quickest)
    )


def test_copies_have_room_for_all_caches_or_are_left_out() -> None:
    whole = dict.fromkeys(NAMES, "d0")
    # one model of either device, with half of four caches: 2 * (100 + 150 + 200 + 250)
    least = memory(request(flight=2), whole, "d0")
    enough = solve(request(flight=4, memory_bytes=least)).generation
    assert enough is not None and enough.copies == ("d0", "d1")
    short = solve(request(flight=4, memory_bytes=least - 1)).generation
    assert short is not None
    assert (short.copies, short.copies_tokens_per_s) == ((), None)


def test_a_model_without_a_cache_that_no_device_holds_has_no_copies() -> None:
    fields = _fields(
        token_profile=_token(
            layers=tuple(layer.model_copy(update={"buffer_bytes": 7}) for layer in _token().layers)
        ),
        generation=GenerationOptions(prompt_tokens=9, new_tokens=6, sequences_in_flight=2),
    )
    whole = dict.fromkeys(NAMES, "d0")
    asked = PlacementRequest(**fields)
    least = memory(asked, whole, "d0")
    for memory_bytes, copies in ((least, ("d0", "d1")), (least - 1, ())):
        found = solve(asked.model_copy(update={"cluster": cluster(2, memory_bytes)}))
        assert found.generation is not None and found.generation.copies == copies


@pytest.mark.parametrize(
    ("flight", "rules"),
    [(1, Constraints()), (2, Constraints(pinned={"a": "d0"})), (2, Constraints(max_devices=1))],
)
def test_there_are_no_copies_of_one_sequence_or_against_rules(
    flight: int, rules: Constraints
) -> None:
    found = solve(request(flight=flight, constraints=rules)).generation
    assert found is not None and found.copies == ()


def test_progress_reports_the_time_of_generations() -> None:
    asked, seen = request(devices=3), []
    found = solve(asked, progress=seen.append)
    assert seen[-1].objective_value == pytest.approx(found.objective_value)
    check(asked, seen[-1].placement())


def test_an_explanation_compares_generations() -> None:
    found = solve(request(memory_bytes=7000, explain=True))
    assert found.limits is not None
    for help in found.limits.improvements:
        assert found.objective_value is not None
        assert help.objective_value < found.objective_value


@pytest.mark.parametrize("flight", [1, 2])
def test_evaluating_the_map_of_a_placement_gives_its_value(flight: int) -> None:
    asked = request(flight=flight)
    found = solve(asked)
    evaluation = evaluate(asked, found)
    assert evaluation.valid
    assert evaluation.objective_value == pytest.approx(found.objective_value)
    assert evaluation.devices == found.devices
    assert evaluation.above_best == pytest.approx(0, abs=1e-9)


def test_a_timeline_shows_a_mean_pass() -> None:
    asked = request(constraints=Constraints(min_devices=2))
    found = solve(asked)
    assert found.objective_value is not None
    assert timeline(asked, found).step_ms == pytest.approx(found.objective_value / 6)


def _changed(found: Placement, **fields: Any) -> Placement:
    assert found.generation is not None
    changed = found.generation.model_copy(update=fields)
    return found.model_copy(update={"generation": changed})


def _with_more_cache(found: Placement) -> Placement:
    first, *others = found.devices
    memory = first.memory.model_copy(
        update={
            "cache_bytes": first.memory.cache_bytes + 1,
            "buffer_bytes": first.memory.buffer_bytes - 1,
        }
    )
    changed = first.model_copy(update={"memory": memory})
    return found.model_copy(update={"devices": (changed, *others)})


LIES: dict[str, Callable[[Placement], Placement]] = {
    "first_token_ms": lambda found: _changed(found, first_token_ms=1.0),
    "token_ms": lambda found: _changed(found, token_ms=1.0),
    "generation_ms": lambda found: _changed(found, generation_ms=1.0),
    "tokens_per_s": lambda found: _changed(found, tokens_per_s=1.0),
    "generation: ": lambda found: _changed(found, prompt_tokens=10),
    "copies: ": lambda found: _changed(found, copies=("d0",)),
    "copies_tokens_per_s": lambda found: _changed(found, copies_tokens_per_s=1.0),
    "generation comes": lambda found: found.model_copy(update={"generation": None}),
    "cache_bytes": _with_more_cache,
    "objective_value": lambda found: found.model_copy(update={"objective_value": 1.0}),
    "speedup": lambda found: found.model_copy(update={"speedup": 9.0}),
    "bound": lambda found: found.model_copy(update={"bound": 1e6}),
}


@pytest.mark.parametrize("word", LIES)
def test_the_referee_refuses_a_wrong(word: str) -> None:
    asked = request(flight=2)
    found = solve(asked)
    check(asked, found)
    with pytest.raises(PlacementError, match=word):
        check(asked, LIES[word](found))


def _fields(**changed: Any) -> dict[str, Any]:
    asked = request()
    fields = {
        name: getattr(asked, name)
        for name in ("profile", "token_profile", "objective", "generation")
    }
    return fields | changed


def _token(**changed: Any) -> Profile:
    token = request().token_profile
    assert token is not None
    return token.model_copy(update=changed)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no options": ({"generation": None}, "generation is missing: .* needs prompt_tokens"),
    "no new token": (
        {"generation": {"prompt_tokens": 5, "new_tokens": 0}},
        "generation.new_tokens: should be greater than or equal to 1, not 0",
    ),
    "no second profile": ({"token_profile": None}, "token_profile is missing: .*suggest measures"),
    "another objective": (
        {"objective": "latency", "token_profile": None},
        "generation: only objective 'generation' uses it; the objective is 'latency'",
    ),
    "a profile for another objective": (
        {"objective": "latency", "generation": None},
        "token_profile: only objective 'generation' uses it",
    ),
    "replicas": ({"replicas": "auto"}, "the objective is 'generation': leave replicas out"),
    "other layers": (
        {"token_profile": _token(layers=_token().layers[:3], edges=_token().edges[:2])},
        "layer 'd' is in one of the two profiles alone",
    ),
    "another batch": ({"token_profile": _token(batch_size=3)}, "has 3 samples .* profile 2"),
    "less buffers": (
        {"token_profile": request().profile, "profile": _token(cluster=cluster(2))},
        "buffers hold the cache in addition",
    ),
    "another order": (
        {
            "token_profile": _token(
                layers=_token().layers[::-1], edges=(Edge(source="d", targets=("a",), bytes=1),)
            )
        },
        "runs against the order of the layers",
    ),
    "ties to break": ({"break_ties": True}, "break_ties: objective 'generation' does not choose"),
}


@pytest.mark.parametrize("tokens", [5, 12])
def test_prompt_tokens_other_than_the_measured_ones_are_refused(tokens: int) -> None:
    """A mask of other sizes does not hide that values have nine rows instead of one."""
    mask = Edge(source="a", targets=("c", "d"), bytes=30)
    token = _token(edges=(*_token().edges, mask.model_copy(update={"bytes": 20})))
    rows = [edge.model_copy(update={"bytes": 9 * edge.bytes}) for edge in _token().edges]
    prompt = request().profile.model_copy(update={"edges": (*rows, mask)})
    fields = _fields(profile=prompt, token_profile=token)
    assert PlacementRequest(**fields).generation == request().generation
    fields["generation"] = GenerationOptions(prompt_tokens=tokens, new_tokens=6)
    message = f"prompt_tokens is {tokens}, .* 9 times as large .*; give 9, or measure a prompt of"
    with pytest.raises(InputError, match=message):
        PlacementRequest(**fields)


@pytest.mark.parametrize("what", WRONG)
def test_a_request_is_refused_that_has(what: str) -> None:
    changed, message = WRONG[what]
    with pytest.raises(InputError, match=message):
        PlacementRequest(**_fields(**changed))


def test_a_training_profile_is_refused() -> None:
    layers = tuple(
        layer.model_copy(update={"backward_ms": {"t0": 1.0, "t1": 1.0}})
        for layer in request().profile.layers
    )
    training = request().profile.model_copy(update={"training": True, "layers": layers})
    with pytest.raises(InputError, match="objective 'generation' places inference"):
        PlacementRequest(**_fields(profile=training))
    assert solve(PlacementRequest(**_fields(profile=training, training=False))).layer_devices
