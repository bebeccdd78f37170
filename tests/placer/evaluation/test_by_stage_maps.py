"""Maps with numbers of replicas of their own, against the solver, the referee and enumeration."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise, permutations

import pytest
from replicas_by_stage import (
    EveryStageShape,
    GroupedSteps,
    bottleneck,
    branching_request,
    in_every_order,
    smallest_bottleneck,
    unlike_counts,
)
from replicated_steps import drawn_request
from small_requests import SHARE

from placer.errors import InputError
from placer.evaluation.compare import compare
from placer.evaluation.evaluate import evaluate, evaluated, map_of
from placer.schema import Constraints, LayerMap, Placement, PlacementRequest, Profile, Replica
from placer.solver.referee import by_stage, loads
from placer.solver.solve import solve

CASES = math.ceil(120 * SHARE)
SCHEDULES = ("1f1b", "zero-bubble", "fill-drain")


def drawn(seed: int, **changed: object) -> PlacementRequest:
    """A question on three or four alike devices, whose batch three replicas can share, too."""
    request = drawn_request(seed, devices=(3, 4))
    fields = {"replicas": "by-stage", "batch_size": (8, 12)[seed % 2], **changed}
    if request.schedule == "interleaved":
        fields.setdefault("schedule", "auto")
    return request.model_copy(update=fields)


def of_throughput(seed: int) -> PlacementRequest:
    """The same under objective ``throughput``."""
    return drawn(
        seed,
        objective="throughput",
        chunks=(6, 12)[seed % 2],
        batch_size=None,
        profiles=(),
        schedule="1f1b",
        step_kind="isolated",
    )


def ample(seed: int, **changed: object) -> PlacementRequest:
    """A question under ``1f1b`` without rules, whose devices have memory for all layers."""
    request = drawn(seed, constraints=Constraints(), schedule="1f1b", **changed)
    devices = [one.model_copy(update={"memory_bytes": 10**13}) for one in request.devices]
    cluster = request.placed_on.model_copy(update={"devices": tuple(devices)})
    return request.model_copy(update={"cluster": cluster})


def of_two_layers(**changed: object) -> PlacementRequest:
    """A question of two layers on four devices with ample memory."""
    seeds = (seed for seed in range(99) if _has_two_layers(drawn(seed)))
    request = ample(next(seeds), batch_size=24)
    return request.model_copy(update=changed)


def _has_two_layers(request: PlacementRequest) -> bool:
    return (len(request.profile.layers), len(request.devices)) == (2, 4)


def map_of_plan(
    request: PlacementRequest, profile: Profile, counts: tuple[int, ...], cuts: tuple[int, ...]
) -> LayerMap:
    """The map of stages on consecutive devices."""
    layers = [layer.name for layer in request.profile.layers]
    devices = [device.name for device in request.devices]
    seats = [devices[start:stop] for start, stop in pairwise(accumulate(counts, initial=0))]
    stages = [layers[start:stop] for start, stop in pairwise([0, *cuts, len(layers)])]
    samples = math.lcm(*counts) * profile.batch_size
    return LayerMap(
        layer_devices={
            name: seat[0] for seat, own in zip(seats, stages, strict=True) for name in own
        },
        replicas={
            seat[0]: tuple(Replica(device=name, samples=samples // len(seat)) for name in seat)
            for seat in seats
            if len(seat) > 1
        },
    )


def require_accepted_if_it_divides(
    request: PlacementRequest, given: LayerMap, divides: bool
) -> bool:
    """Check that a map is refused exactly if the batch does not have whole micro-batches of it."""
    if not divides:
        with pytest.raises(InputError, match=r"give a multiple of|has to be a multiple of that"):
            evaluated(request, given)
    return divides


@pytest.mark.parametrize("question", [drawn, of_throughput])
def test_a_placement_by_stage_is_evaluated_as_the_solver_predicts_it(question) -> None:
    seen = 0
    for seed in range(2 * CASES):
        request = question(seed)
        placement = solve(request)
        if placement.method != "replicas by stage":
            continue
        found = evaluate(request, placement, best=False)
        assert (found.valid, found.faults) == (True, ())
        assert found.objective_value == placement.objective_value
        assert found.devices == placement.devices
        assert found.stages == placement.stages
        assert found.single_device == placement.single_device
        seen += 1
    assert seen >= 1


def test_every_plan_takes_the_step_of_the_enumeration_and_none_is_better_than_the_solvers() -> None:
    valid = invalid = 0
    for seed in range(CASES):
        request = drawn(seed)
        best, values = solve(request), []
        orders = SCHEDULES if request.schedule == "auto" else (request.schedule,)
        for counts, cuts in unlike_counts(request):
            rules = request.constraints
            counted = (rules.min_devices or 1) <= sum(counts) <= (rules.max_devices or 99)
            for profile in (request.profile, *request.profiles):
                given = map_of_plan(request, profile, counts, cuts)
                plans = [GroupedSteps(request, profile, one, counts, cuts) for one in orders]
                divides = not plans[0].rest and plans[0].chunks > 0
                if not require_accepted_if_it_divides(request, given, divides):
                    continue
                found = evaluated(request, given)
                steps = [value for plan in plans for value in plan.all()] if counted else []
                assert found.valid == bool(steps)
                if found.valid:
                    assert found.objective_value == pytest.approx(min(steps), rel=1e-9)
                    values.append(found.objective_value)
                valid, invalid = valid + found.valid, invalid + (not found.valid)
        least = min(values, default=None)
        expected = min(EveryStageShape(request).by_stage(), default=None)
        assert least == (None if expected is None else pytest.approx(expected, rel=1e-9))
        if least is not None:
            assert best.objective_value <= least * (1 + 2e-6)
            assert best.bound <= least * (1 + 1e-9)
    assert valid >= 1
    assert invalid >= 1


def test_every_plan_has_the_bottleneck_of_the_enumeration_and_none_is_better() -> None:
    seen = 0
    for seed in range(CASES):
        request = of_throughput(seed)
        best, values = solve(request), []
        for counts, cuts in unlike_counts(request):
            rules = request.constraints
            counted = (rules.min_devices or 1) <= sum(counts) <= (rules.max_devices or 99)
            given = map_of_plan(request, request.profile, counts, cuts)
            divides = request.chunks % math.lcm(*counts) == 0
            if not require_accepted_if_it_divides(request, given, divides):
                continue
            found = evaluated(request, given)
            expected = bottleneck(request, counts, cuts) if counted else []
            assert found.valid == bool(expected)
            if found.valid:
                assert found.objective_value == pytest.approx(expected[0], rel=1e-9)
                values.append(found.objective_value)
                seen += 1
        assert min(values, default=None) == (
            None if not values else pytest.approx(smallest_bottleneck(request), rel=1e-9)
        )
        if values:
            assert best.objective_value <= min(values) * (1 + 2e-6)
    assert seen >= 1


@pytest.mark.parametrize("order", ["1f1b", "fill-drain"])
def test_loads_and_memory_of_every_plan_are_those_of_the_referee(order: str) -> None:
    seen = 0
    for seed in range(CASES):
        request = drawn(seed, schedule=order, constraints=Constraints(recompute="never"))
        for counts, cuts in unlike_counts(request):
            plan = GroupedSteps(request, request.profile, order, counts, cuts)
            if plan.rest or not plan.chunks:
                continue
            given = map_of_plan(request, request.profile, counts, cuts)
            found = evaluated(request, given)
            claimed = Placement(
                status="feasible",
                objective="step",
                layer_devices=given.layer_devices,
                replicas=given.replicas,
                batch_size=math.lcm(*counts) * request.profile.batch_size,
                chunks=plan.chunks,
                schedule=order,
                stages=found.stages,
            )
            claim = by_stage.claim(request, claimed)
            times = loads.times_of(claim.request, claimed.layer_devices, claim.members, claim.units)
            first_of = by_stage.firsts(claim)
            for load in found.devices:
                own = times[load.device]
                assert (load.compute_ms, load.send_ms, load.receive_ms) == pytest.approx(
                    (own.compute_ms, own.send_ms, own.receive_ms)
                )
                if load.device in first_of:
                    stage = found.stages.index(first_of[load.device])
                    use = plan.use(stage, plan.fewest(stage), again=False)
                    assert load.memory.total_bytes == use
                    assert load.layers == sum(one == stage for one in plan.stage_of.values())
                seen += 1
    assert seen >= 1


def test_stages_may_be_in_any_order_in_which_values_run_forwards() -> None:
    reordered = 0
    for seed in range(math.ceil(48 * SHARE)):
        request = branching_request(seed)
        bound = solve(request).bound
        for other in in_every_order(request):
            names = [layer.name for layer in other.profile.layers]
            for counts, cuts in unlike_counts(other):
                given = map_of_plan(other, request.profile, counts, cuts)
                plan = GroupedSteps(other, other.profile, request.schedule, counts, cuts)
                if plan.rest or not plan.chunks:
                    continue
                found = evaluated(request, given)
                assert found.objective_value >= bound * (1 - 1e-9)
                # the same stages, in the order of the evaluation
                layers = sorted(
                    request.profile.layers,
                    key=lambda layer: found.stages.index(given.layer_devices[layer.name]),
                )
                profile = other.profile.model_copy(update={"layers": tuple(layers)})
                sizes = [list(given.layer_devices.values()).count(one) for one in found.stages]
                own = [len(given.replicas.get(device, ())) or 1 for device in found.stages]
                ends = [*accumulate(sizes)][:-1]
                (expected,) = GroupedSteps(
                    other, profile, request.schedule, tuple(own), tuple(ends)
                ).all()
                assert found.objective_value == pytest.approx(expected, rel=1e-9)
                reordered += names != [layer.name for layer in request.profile.layers]
    assert reordered >= 1


def three_to_one(request: PlacementRequest) -> LayerMap:
    """The first layer on three devices, the second one on the fourth."""
    return map_of_plan(request, request.profile, (3, 1), (1,))


@pytest.mark.parametrize(
    ("changed", "kind", "devices"),
    [
        (Constraints(max_devices=3), "too-many-devices", ("d0", "d1", "d2", "d3")),
        (Constraints(forbidden={"l0": ["d2"]}), "device-forbidden", ("d2",)),
        (Constraints(forbidden={"l1": ["d3"]}), "device-forbidden", ("d3",)),
        (Constraints(colocated=[["l0", "l1"]]), "colocation-broken", ("d0", "d3")),
    ],
)
def test_rules_hold_for_every_replica_and_are_named_once(
    changed: Constraints, kind: str, devices: tuple[str, ...]
) -> None:
    request = of_two_layers(constraints=changed)
    (fault,) = evaluated(request, three_to_one(request)).faults
    assert (fault.kind, fault.devices) == (kind, devices)


def test_a_layer_with_replicas_is_not_where_it_is_pinned() -> None:
    request = of_two_layers(constraints=Constraints(pinned={"l0": "d1"}))
    faults = evaluated(request, three_to_one(request)).faults
    assert [(one.kind, one.devices[1]) for one in faults] == [
        ("pin-broken", "d0"),
        ("pin-broken", "d2"),
    ]


def test_every_device_without_the_memory_is_named_and_the_cost_is_known() -> None:
    request = of_two_layers()
    devices = [one.model_copy(update={"memory_bytes": 1}) for one in request.devices]
    cluster = request.placed_on.model_copy(update={"devices": tuple(devices)})
    found = evaluated(request.model_copy(update={"cluster": cluster}), three_to_one(request))
    assert [(one.kind, one.devices) for one in found.faults] == [
        ("out-of-memory", (name,)) for name in ("d0", "d1", "d2", "d3")
    ]
    assert found.objective_value == evaluated(request, three_to_one(request)).objective_value


@pytest.mark.parametrize("missing", [("d2", "d3"), ("d3", "d1"), ("d0", "d2")])
def test_links_between_units_and_between_replicas_are_needed(missing: tuple[str, str]) -> None:
    request = of_two_layers()
    links = [one for one in request.placed_on.links if (one.source, one.target) != missing]
    cluster = request.placed_on.model_copy(update={"links": tuple(links)})
    found = evaluated(request.model_copy(update={"cluster": cluster}), three_to_one(request))
    assert [(one.kind, one.devices) for one in found.faults] == [("link-missing", missing)]
    assert found.objective_value is None


def test_each_replica_sends_its_own_units_and_needs_links_for_these_alone() -> None:
    request = of_two_layers()
    names = [f"d{number}" for number in range(6)]
    device, link = request.devices[0], request.placed_on.links[0]
    ends = [*permutations(names, 2)]

    def linked_by(pairs: list[tuple[str, str]]) -> PlacementRequest:
        changed = {
            "devices": tuple(device.model_copy(update={"name": name}) for name in names),
            "links": tuple(link.model_copy(update={"source": a, "target": b}) for a, b in pairs),
        }
        return request.model_copy(update={"cluster": request.placed_on.model_copy(update=changed)})

    whole = linked_by(ends)
    given = map_of_plan(whole, whole.profile, (2, 4), (1,))
    # d0 has units 0 and 1, which d2 and d3 read; d1 has units 2 and 3, which d4 and d5 read
    unused = [("d0", "d4"), ("d0", "d5"), ("d1", "d2"), ("d1", "d3")]
    unused += [(target, source) for source, target in unused]
    found = evaluated(linked_by([pair for pair in ends if pair not in unused]), given)
    assert found == evaluated(whole, given)
    assert found.valid
    found = evaluated(linked_by([pair for pair in ends if pair != ("d1", "d4")]), given)
    assert [(one.kind, one.devices) for one in found.faults] == [("link-missing", ("d1", "d4"))]


def test_values_must_not_run_in_a_cycle_between_stages() -> None:
    request = branching_request(1)
    row = [one.model_copy(update={"name": f"r{i}"}) for i, one in enumerate(request.profile.layers)]
    (edge, *_) = request.profile.edges
    edges = tuple(
        edge.model_copy(update={"source": a.name, "targets": (b.name,)}) for a, b in pairwise(row)
    )
    profile = request.profile.model_copy(update={"layers": tuple(row), "edges": edges})
    request = request.model_copy(update={"profile": profile, "profiles": ()})
    where = {layer.name: "d0" for layer in row} | {row[1].name: "d2"}
    size = profile.batch_size
    members = tuple(Replica(device=name, samples=size) for name in ("d0", "d1"))
    found = evaluated(request, LayerMap(layer_devices=where, replicas={"d0": members}))
    assert [fault.kind for fault in found.faults] == ["not-contiguous"]
    assert found.objective_value is None


def test_an_unknown_device_of_a_replica_is_named() -> None:
    request = of_two_layers()
    given = three_to_one(request)
    first, *others = given.replicas["d0"]
    strange = first.model_copy(update={"device": "d9"})
    given = given.model_copy(update={"replicas": {"d0": (first, strange, others[1])}})
    (fault,) = evaluated(request, given).faults
    assert (fault.kind, fault.devices) == ("device-unknown", ("d9",))


def samples_of(given: LayerMap, *samples: int) -> LayerMap:
    """The map with other shares of the first stage."""
    members = [
        one.model_copy(update={"samples": size})
        for one, size in zip(given.replicas["d0"], samples, strict=True)
    ]
    return given.model_copy(update={"replicas": {"d0": tuple(members)}})


def test_maps_that_no_units_fit_are_refused() -> None:
    request = of_two_layers(profiles=())
    size, given = request.profile.batch_size, three_to_one(request)
    last = given.replicas["d0"][2].model_copy(update={"device": "d3"})
    cases = [
        (request, samples_of(given, size, size, 2 * size), "an equal part of the micro-batch"),
        (request, samples_of(given, 7, 7, 7), r"3 units of 7, and micro-batches of \[\d\] samples"),
        (
            request.model_copy(update={"batch_size": 4 * size}),
            given,
            "has to be a multiple of that",
        ),
        (
            request.model_copy(update={"objective": "throughput", "batch_size": None, "chunks": 4}),
            given,
            "share 3 micro-batches at a time.*is 4: give a multiple of 3",
        ),
        (
            request,
            given.model_copy(update={"replicas": {"d0": (*given.replicas["d0"][:2], last)}}),
            "'d3' is given twice",
        ),
        (request.model_copy(update={"schedule": "interleaved"}), given, "'fill-drain'"),
        (request.model_copy(update={"for_format": "piper"}), given, "leave out format 'piper'"),
        (request.model_copy(update={"objective": "latency"}), given, "'latency' of training"),
    ]
    for asked, wrong, message in cases:
        with pytest.raises(InputError, match=message):
            evaluated(asked, wrong)


def test_the_replicas_of_a_stage_are_on_alike_devices() -> None:
    request = of_two_layers()
    given = three_to_one(request)
    alike = evaluated(request, given)
    for name, is_refused in (("d2", True), ("d3", False)):
        devices = [
            one.model_copy(update={"memory_bytes": 10**12}) if one.name == name else one
            for one in request.devices
        ]
        cluster = request.placed_on.model_copy(update={"devices": tuple(devices)})
        asked = request.model_copy(update={"cluster": cluster})
        if is_refused:
            with pytest.raises(InputError, match="the replicas of 'd0' are on devices of diff"):
                evaluated(asked, given)
        else:
            assert evaluated(asked, given).objective_value == alike.objective_value


def test_the_format_of_pipedream_has_replicas_by_stage() -> None:
    request = of_two_layers(for_format="pipedream")
    assert evaluated(request, three_to_one(request)).valid


def test_a_placement_and_a_map_by_stage_are_compared_with_whole_copies() -> None:
    request = of_two_layers()
    by_stages, size = three_to_one(request), request.profile.batch_size
    members = tuple(Replica(device=name, samples=size) for name in ("d0", "d1"))
    copies = LayerMap(layer_devices={"l0": "d0", "l1": "d0"}, replicas={"d0": members})
    best = solve(request)
    found = compare(
        request,
        {"3-1": by_stages, "copies": copies, "best": map_of(request, best)},
        {"best": best},
    )
    assert [one.objective_value for one in found.evaluations[:2]] == [
        evaluated(request, one).objective_value for one in (by_stages, copies)
    ]
    assert found.evaluations[2].objective_value == pytest.approx(best.objective_value)
    assert found.moves[0].devices[:2] == ("d0, d1, d2", "d0, d1")


def test_the_schedule_of_a_placement_is_used_if_the_request_allows_it() -> None:
    request = of_two_layers(schedule="auto")
    given = three_to_one(request)
    placement = Placement(
        status="feasible",
        objective="step",
        layer_devices=given.layer_devices,
        replicas=given.replicas,
        batch_size=3 * request.profile.batch_size,
        schedule="fill-drain",
    )
    chosen = evaluated(request, given, chosen_by=placement)
    fixed = evaluated(request.model_copy(update={"schedule": "fill-drain"}), given)
    assert chosen == fixed
    other = request.model_copy(update={"schedule": "1f1b"})
    assert evaluated(other, given, chosen_by=placement) == evaluated(other, given)
