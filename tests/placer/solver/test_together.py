"""Several models under one memory budget: against enumeration, and against the referee."""

from __future__ import annotations

from typing import Any

import pytest
from joint_requests import best_ms, chain, pair, random_request

from placer.errors import InputError, PlacementError
from placer.schema import (
    Cluster,
    Constraints,
    Device,
    Edge,
    Layer,
    PlacementRequest,
    Profile,
    SolveOptions,
    TiedParameters,
)
from placer.schema.joint import JointPlacement, JointRequest, ProfiledModel
from placer.solver.check import check
from placer.solver.referee.joint import check_together
from placer.solver.solve import solve
from placer.solver.together import divided, solve_together

SEEDS = 40


def test_no_placements_of_small_models_are_better_and_the_bound_holds() -> None:
    statuses = []
    for seed in range(SEEDS):
        request = random_request(seed)
        found = solve_together(request)
        check(request.placement_request(), found.joint)
        best = best_ms(request)
        statuses.append(found.joint.status)
        if best is None:
            assert found.joint.status == "infeasible" and found.placements == {}, seed
            continue
        assert found.joint.status == "optimal", seed
        assert found.request_ms == pytest.approx(best, rel=2e-6), seed
        assert found.bound_ms is not None and found.bound_ms <= best * (1 + 1e-9), seed
    assert {"optimal", "infeasible"} == set(statuses)


def _layer(name: str, ms: float = 1.0, weights: int = 0, workspace: int = 0) -> Layer:
    return Layer(
        name=name, forward_ms={"a": ms}, param_bytes=weights, forward_workspace_bytes=workspace
    )


def _request(cluster: Cluster, models: dict[str, tuple[list[Layer], int]], **how: Any) -> Any:
    profiled = {
        name: ProfiledModel(profile=chain(cluster, *layers, edge_bytes=10), runs=runs)
        for name, (layers, runs) in models.items()
    }
    return JointRequest(models=profiled, **how)


def test_memory_is_the_weights_of_all_models_and_the_largest_peak_of_one() -> None:
    encoder = [_layer("a", weights=30, workspace=40)]
    decoder = [_layer("a", weights=20, workspace=25)]
    # 30 + 20 + max(40, 25)
    for memory, status in ((90, "optimal"), (89, "infeasible")):
        cluster = Cluster(devices=(Device(name="cpu:0", type="a", memory_bytes=memory),))
        found = solve_together(
            _request(cluster, {"encoder": (encoder, 1), "decoder": (decoder, 1)})
        )
        assert found.joint.status == status
        if status == "optimal":
            assert found.devices[0].memory.total_bytes == 90


def test_the_model_that_runs_more_often_stays_whole() -> None:
    halves = [_layer("a", weights=50), _layer("b", weights=50)]
    models = {"rare": (halves, 1), "often": (halves, 20)}
    found = solve_together(_request(pair(160), models))
    assert len(set(found.placements["often"].layer_devices.values())) == 1
    assert found.request_ms == pytest.approx(20 * 2 + 2)


def test_transfers_of_a_model_count_once_for_each_run() -> None:
    halves = [_layer("a", weights=50), _layer("b", weights=50)]
    found = solve_together(_request(pair(60), {"unet": (halves, 50)}))
    # 10 bytes at 1e6 bytes/s and a latency of 1 ms, 50 times
    assert found.request_ms == pytest.approx(50 * (2 + 1.01))
    assert sum(load.send_ms for load in found.devices) == pytest.approx(50 * 1.01)
    assert found.placements["unet"].objective_value == pytest.approx(2 + 1.01)


def test_a_model_may_follow_another_without_a_link_between_their_devices() -> None:
    models = {"encoder": ([_layer("a", weights=50)], 1), "decoder": ([_layer("a", weights=50)], 1)}
    constraints = Constraints(pinned={"encoder/a": "cpu:1", "decoder/a": "cpu:0"})
    found = solve_together(_request(pair(60, linked=False), models, constraints=constraints))
    assert found.request_ms == pytest.approx(2)


def test_models_do_not_overlap_although_they_are_on_different_devices() -> None:
    models = {"one": ([_layer("a", 3.0, weights=50)], 1), "other": ([_layer("a", 4.0, 50)], 1)}
    found = solve_together(_request(pair(60), models))
    assert len({load.device for load in found.devices if load.layers}) == 2
    assert found.request_ms == pytest.approx(7)


def test_each_placement_answers_the_request_for_its_model_alone() -> None:
    request = random_request(26)
    found = solve_together(request)
    assert len(found.placements) == len(request.models) > 1
    for name, placement in found.placements.items():
        check(request.of_model(name), placement)


def test_placements_survive_json() -> None:
    found = solve_together(random_request(26))
    assert JointPlacement.model_validate_json(found.to_json()) == found


def test_layers_that_share_parameters_stay_together_or_have_copies() -> None:
    tie = TiedParameters(layers=("a", "b"), param_bytes=40, split=True)
    layers = (_layer("a", weights=45), _layer("b", weights=5))
    profile = chain(pair(52), *layers).model_copy(update={"tied": (tie,)})
    request = JointRequest(models={"encoder": ProfiledModel(profile=profile)})
    assert solve_together(request).devices[0].memory.param_bytes == 50
    constraints = Constraints(pinned={"encoder/a": "cpu:0", "encoder/b": "cpu:1"})
    apart = solve_together(request.model_copy(update={"constraints": constraints}))
    assert [load.memory.param_bytes for load in apart.devices] == [45, 45]


def test_each_device_counts_with_its_smallest_memory_and_its_largest_reserve() -> None:
    def profile(memory: int, reserve: int) -> Profile:
        device = Device(name="cpu:0", type="a", memory_bytes=memory, reserve_bytes=reserve)
        return chain(Cluster(devices=(device,)), _layer("a"))

    models = {
        "one": ProfiledModel(profile=profile(100, 5)),
        "other": ProfiledModel(profile=profile(90, 7)),
    }
    (device,) = JointRequest(models=models).cluster.devices
    assert (device.memory_bytes, device.reserve_bytes) == (90, 7)


def _tampered(found: JointPlacement, what: str) -> JointPlacement:
    """Return an answer with one false claim."""
    joint, name = found.joint, next(iter(found.placements))
    placement = found.placements[name]
    if what == "runs":
        return found.model_copy(update={"runs": {**found.runs, name: found.runs[name] + 1}})
    if what == "time":
        value = (joint.objective_value or 0.0) + 1
        return found.model_copy(
            update={"joint": joint.model_copy(update={"objective_value": value})}
        )
    if what == "bound":
        value = 2 * (joint.objective_value or 0.0)
        return found.model_copy(update={"joint": joint.model_copy(update={"bound": value})})
    if what == "memory":
        first, *others = joint.devices
        use = first.memory.model_copy(update={"param_bytes": first.memory.param_bytes - 1})
        devices = (first.model_copy(update={"memory": use}), *others)
        return found.model_copy(update={"joint": joint.model_copy(update={"devices": devices})})
    if what == "map":
        where = dict(placement.layer_devices)
        layer = next(iter(where))
        where[layer] = "cpu:1" if where[layer] == "cpu:0" else "cpu:0"
        changed = placement.model_copy(update={"layer_devices": where})
        return found.model_copy(update={"placements": {**found.placements, name: changed}})
    others = {key: one for key, one in found.placements.items() if key != name}
    return found.model_copy(update={"placements": others})


@pytest.mark.parametrize("what", ["runs", "time", "bound", "memory", "map", "a model"])
def test_the_referee_refuses_a_false_claim(what: str) -> None:
    request = random_request(26)
    found = solve_together(request)
    check_together(request, found)
    with pytest.raises(PlacementError):
        check_together(request, _tampered(found, what))


def test_an_answer_to_another_request_is_refused() -> None:
    request = random_request(26)
    joint = solve(request.placement_request())
    more = {name: model.model_copy(update={"runs": 3}) for name, model in request.models.items()}
    with pytest.raises(PlacementError):
        divided(request.model_copy(update={"models": more}), joint)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"models": {}}, "models"),
        ({"constraints": Constraints(contiguous=True)}, "constraints.contiguous is True"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(changed: dict[str, Any], message: str) -> None:
    whole = {"models": random_request(26).models, **changed}
    with pytest.raises(InputError, match=message):
        JointRequest(**whole)


def test_a_name_with_the_separator_is_refused() -> None:
    with pytest.raises(InputError, match="the name 'a/b' has a '/'"):
        _request(pair(9), {"a/b": ([_layer("a")], 1)})


def test_profiles_of_other_devices_are_refused() -> None:
    other = Cluster(devices=(Device(name="cuda:0", type="a", memory_bytes=9),))
    models = {
        "one": ProfiledModel(profile=chain(pair(9), _layer("a"))),
        "other": ProfiledModel(profile=chain(other, _layer("a"))),
    }
    with pytest.raises(InputError, match="the profile of 'other' has the devices cuda:0"):
        JointRequest(models=models)


def test_a_profile_without_devices_is_refused() -> None:
    models = {"one": ProfiledModel(profile=Profile(layers=(_layer("a"),)))}
    with pytest.raises(InputError, match="the profile of 'one' has no cluster"):
        JointRequest(models=models)


def test_what_is_not_a_joint_request_is_refused() -> None:
    with pytest.raises(InputError, match=r"solve_together was given a dict"):
        solve_together({})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "throughput", "constraints": Constraints(contiguous=False)},
        {"objective": "latency"},
        {"objective": "memory", "constraints": Constraints(contiguous=False)},
    ],
)
def test_other_requests_refuse_values_that_are_sent_several_times(options: dict[str, Any]) -> None:
    layers = (_layer("a"), _layer("b"))
    edge = Edge(source="a", targets=("b",), bytes=1, repeats=50)
    profile = Profile(layers=layers, edges=(edge,), cluster=pair(9))
    with pytest.raises(InputError, match="the value of 'a' has repeats 50"):
        PlacementRequest.from_options(SolveOptions(**options), [profile])
