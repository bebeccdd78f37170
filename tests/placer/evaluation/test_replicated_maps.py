"""Maps with replicas, against the solver, the enumeration of every shape, and hand-made faults."""

from __future__ import annotations

import itertools
import math

import pytest
from replicated_steps import EveryShape, drawn_request
from small_requests import SHARE

from placer.errors import InputError
from placer.evaluation.evaluate import evaluate, evaluated
from placer.schema import Constraints, Edge, LayerMap, Placement, PlacementRequest, Replica
from placer.solver.solve import solve


def of_throughput(request: PlacementRequest) -> PlacementRequest:
    """The same question under objective ``throughput``, of four micro-batches."""
    changed = {
        "objective": "throughput",
        "profiles": (),
        "batch_size": None,
        "chunks": 4,
        "schedule": "1f1b" if request.schedule == "auto" else request.schedule,
    }
    kept = request.model_dump(exclude={"step_kind", *changed})
    return PlacementRequest.model_validate({**kept, **changed})


@pytest.mark.parametrize("unlike", [False, True])
@pytest.mark.parametrize("objective", ["step", "throughput"])
def test_a_placement_with_replicas_is_evaluated_as_the_solver_predicts_it(
    objective: str, unlike: bool
) -> None:
    seen = 0
    for seed in range(math.ceil(200 * SHARE)):
        request = drawn_request(seed, devices=(2, 3, 4), unlike=unlike)
        if objective == "throughput":
            request = of_throughput(request)
        placement = solve(request)
        if not placement.replicas:
            continue
        found = evaluate(request, placement, best=False)
        assert (found.valid, found.faults) == (True, ())
        assert found.objective_value == pytest.approx(placement.objective_value, rel=1e-12)
        assert found.devices == placement.devices
        assert found.stages == placement.stages
        assert found.single_device == placement.single_device
        seen += 1
    assert seen >= 1


def every_equal_pipeline(request: PlacementRequest) -> list[LayerMap]:
    """Every map of the layers to pipelines of consecutive devices, with every measured share."""
    names = [layer.name for layer in request.profile.layers]
    devices = [device.name for device in request.devices]
    maps = []
    for count in range(2, len(devices) + 1):
        if len(devices) % count or request.whole_batch_size % count:
            continue
        size = len(devices) // count
        first = devices[:size]
        for profile in (request.profile, *request.profiles):
            if request.whole_batch_size // count % profile.batch_size:
                continue
            for choice in itertools.product(first, repeat=len(names)):
                replicas = {
                    name: tuple(
                        Replica(device=twin, samples=profile.batch_size)
                        for twin in devices[first.index(name) :: size]
                    )
                    for name in set(choice)
                }
                where = dict(zip(names, choice, strict=True))
                maps.append(LayerMap(layer_devices=where, replicas=replicas))
    return maps


def test_the_best_of_all_maps_is_the_best_of_every_shape() -> None:
    seen = 0
    for seed in range(math.ceil(60 * SHARE)):
        request = drawn_request(seed, devices=(2, 4))
        expected = min(EveryShape(request).equal_pipelines(), default=None)
        values = [
            one.objective_value
            for given in every_equal_pipeline(request)
            if (one := evaluated(request, given)).valid
        ]
        assert min(values, default=None) == (
            expected if expected is None else pytest.approx(expected, rel=1e-9)
        )
        seen += expected is not None
    assert seen >= 1


def test_profiles_of_several_sizes_are_evaluated_as_their_request() -> None:
    request = drawn_request(3, devices=(2,))
    given = every_equal_pipeline(request)[0]
    options = {"objective": "step", "batch_size": request.batch_size, "best": False}
    options |= {"step_kind": request.step_kind, "schedule": request.schedule}
    options |= {"constraints": request.constraints}
    profiles = [
        one.model_copy(update={"cluster": request.cluster})
        for one in (request.profile, *request.profiles)
    ]
    assert evaluate(profiles, given, **options) == evaluate(request, given, best=False)


def request_of_two(**changed: object) -> PlacementRequest:
    """A question of two devices with memory for the whole model each."""
    request = drawn_request(1, devices=(2,), schedule="1f1b", constraints=Constraints())
    devices = [one.model_copy(update={"memory_bytes": 10**12}) for one in request.devices]
    cluster = request.placed_on.model_copy(update={"devices": tuple(devices)})
    return request.model_copy(update={"cluster": cluster, **changed})


def copies(request: PlacementRequest, *samples: int, names: tuple[str, ...] = ()) -> LayerMap:
    """Whole copies of the model, with shares, on devices in order."""
    devices = names or tuple(device.name for device in request.devices)
    members = tuple(
        Replica(device=name, samples=size) for name, size in zip(devices, samples, strict=True)
    )
    where = {layer.name: devices[0] for layer in request.profile.layers}
    return LayerMap(layer_devices=where, replicas={devices[0]: members})


@pytest.mark.parametrize(
    ("changed", "kind", "devices"),
    [
        ({"constraints": Constraints(max_devices=1)}, "too-many-devices", ("d0", "d1")),
        ({"constraints": Constraints(forbidden={"l0": ["d1"]})}, "device-forbidden", ("d1",)),
        ({"constraints": Constraints(pinned={"l0": "d0"})}, "pin-broken", ("d0", "d1")),
    ],
)
def test_rules_hold_for_every_replica(
    changed: dict[str, object], kind: str, devices: tuple[str, ...]
) -> None:
    request = request_of_two(**changed)
    size = request.profile.batch_size
    (fault,) = evaluated(request, copies(request, size, size)).faults
    assert (fault.kind, fault.devices) == (kind, devices)


def test_each_replica_needs_memory_of_its_own() -> None:
    request = request_of_two()
    first, second = request.devices
    small = second.model_copy(update={"memory_bytes": 1})
    cluster = request.placed_on.model_copy(update={"devices": (first, small)})
    size = request.profile.batch_size
    given = copies(request, size, size)
    found = evaluated(request.model_copy(update={"cluster": cluster}), given)
    assert [(one.kind, one.devices) for one in found.faults] == [("out-of-memory", ("d1",))]
    assert found.objective_value is not None


def test_replicas_without_a_link_exchange_no_gradients() -> None:
    request = request_of_two()
    cluster = request.placed_on.model_copy(update={"links": request.placed_on.links[:1]})
    size = request.profile.batch_size
    found = evaluated(request.model_copy(update={"cluster": cluster}), copies(request, size, size))
    assert [(one.kind, one.devices) for one in found.faults] == [("link-missing", ("d1", "d0"))]
    assert found.objective_value is None


def test_a_replica_on_a_device_that_the_cluster_lacks_is_named() -> None:
    request = request_of_two()
    size = request.profile.batch_size
    (fault,) = evaluated(request, copies(request, size, size, names=("d0", "d7"))).faults
    assert (fault.kind, fault.devices) == ("device-unknown", ("d7",))


def pipelines_of_two(**changed: object) -> tuple[PlacementRequest, LayerMap]:
    """A question of four devices, and two pipelines of two devices that alternate by layer."""
    request = drawn_request(1, devices=(4,), schedule="interleaved", constraints=Constraints())
    first = request.profile.layers[0].model_copy(update={"saved_bytes": 10**6})
    names = ("l0", "l1", "l2")
    layers = tuple(first.model_copy(update={"name": name}) for name in names)
    edges = tuple(
        Edge(source=a, targets=(b,), bytes=8, gradient_bytes=8)
        for a, b in itertools.pairwise(names)
    )
    profile = request.profile.model_copy(update={"layers": layers, "edges": edges})
    devices = [one.model_copy(update={"memory_bytes": 10**12}) for one in request.devices]
    cluster = request.placed_on.model_copy(update={"devices": tuple(devices)})
    fields = {"cluster": cluster, "profile": profile, "profiles": ()}
    size = profile.batch_size
    replicas = {
        one: tuple(Replica(device=name, samples=size) for name in (one, other))
        for one, other in (("d0", "d2"), ("d1", "d3"))
    }
    where = {"l0": "d0", "l1": "d1", "l2": "d0"}
    given = LayerMap(layer_devices=where, replicas=replicas)
    return request.model_copy(update=fields | changed), given


def test_under_throughput_the_request_says_whether_stages_are_contiguous() -> None:
    request, given = pipelines_of_two(constraints=Constraints(contiguous=False))
    assert evaluated(of_throughput(request), given).valid
    request, given = pipelines_of_two()
    kinds = [fault.kind for fault in evaluated(of_throughput(request), given).faults]
    assert kinds == ["not-contiguous"] * 2


def test_a_schedule_that_the_request_does_not_allow_is_chosen_again() -> None:
    request, given = pipelines_of_two(schedule="1f1b")
    given = given.model_copy(update={"layer_devices": {"l0": "d0", "l1": "d0", "l2": "d1"}})
    placement = Placement(
        status="feasible",
        objective="step",
        layer_devices=given.layer_devices,
        replicas=given.replicas,
        batch_size=2 * request.profile.batch_size,
        schedule="fill-drain",
    )
    allowed = evaluated(request, given)
    assert evaluated(request, given, chosen_by=placement) == allowed
    other = request.model_copy(update={"schedule": "fill-drain"})
    assert evaluated(other, given, chosen_by=placement) != allowed


def test_every_missing_link_is_named() -> None:
    request, given = pipelines_of_two()
    ways = [("d0", "d1"), ("d1", "d0"), ("d2", "d3"), ("d3", "d2")]
    links = [one for one in request.placed_on.links if (one.source, one.target) not in ways]
    cluster = request.placed_on.model_copy(update={"links": tuple(links)})
    found = evaluated(request.model_copy(update={"cluster": cluster}), given)
    assert sorted(fault.devices for fault in found.faults) == ways


def test_a_broken_rule_about_layers_is_named_once() -> None:
    request, given = pipelines_of_two(constraints=Constraints(max_layers=1))
    assert [fault.kind for fault in evaluated(request, given).faults] == ["too-many-layers"]


def test_replicas_are_refused_for_a_format_without_them() -> None:
    request = request_of_two(for_format="torchgpipe")
    size = request.profile.batch_size
    with pytest.raises(InputError, match="leave out the replicas, or format 'torchgpipe'"):
        evaluated(request, copies(request, size, size))


def test_the_single_device_of_a_map_is_the_one_of_the_solver() -> None:
    for seed in range(math.ceil(200 * SHARE)):
        request = drawn_request(seed).model_copy(update={"replicas": "never"})
        placement = solve(request)
        if placement.layer_devices:
            found = evaluate(request, placement, best=False)
            assert found.single_device == placement.single_device


def test_replicas_that_fit_neither_map_nor_batch_are_refused() -> None:
    request = request_of_two()
    size = request.profile.batch_size
    good = copies(request, size, size)
    (members,) = good.replicas.values()
    three = request.model_copy(update={"batch_size": 2 * size + 1})
    cases = {
        "replicas are given for ['d1']": good.model_copy(update={"replicas": {"d1": members}}),
        "1 device given; give two or more": good.model_copy(
            update={"replicas": {"d0": members[:1]}}
        ),
        "give 'd0' first": good.model_copy(update={"replicas": {"d0": members[::-1]}}),
        "'d0' is given twice": good.model_copy(update={"replicas": {"d0": members[:1] * 2}}),
        f"micro-batches of [{size}": copies(request, 1000 * size, 1000 * size),
    }
    for message, given in cases.items():
        asked = request
        if "micro-batches" in message:
            asked = request.model_copy(update={"batch_size": 2000 * size})
        with pytest.raises(InputError) as caught:
            evaluated(asked, given)
        assert message in str(caught.value)
    with pytest.raises(InputError, match="has to be a multiple of that"):
        evaluated(three, good)
    with pytest.raises(InputError, match="objective 'latency' of training"):
        evaluated(request.model_copy(update={"objective": "latency"}), good)
