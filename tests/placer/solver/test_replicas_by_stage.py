"""Stages with numbers of replicas of their own, against every answer that there could be."""

import math

import pytest
from replicas_by_stage import (
    EveryStageShape,
    branching_request,
    in_every_order,
    smallest_bottleneck,
)
from replicated_steps import MB, drawn_request
from rows import row
from small_requests import SHARE

from placer.errors import PlacementError
from placer.schedule.gradient_pieces import ADD_BYTES_PER_S
from placer.schema import Constraints, Replica
from placer.solver.check import check
from placer.solver.solve import solve

CASES = math.ceil(120 * SHARE)
BRANCHING_CASES = math.ceil(48 * SHARE)
HEAVY = 4_000 * MB
RATE = 1e10


def drawn(seed):
    """A question on three or four devices, whose batch three replicas can share, too."""
    request = drawn_request(seed, devices=(3, 4))
    return request.model_copy(update={"replicas": "by-stage", "batch_size": (8, 12)[seed % 2]})


def test_no_cuts_and_numbers_of_replicas_give_a_shorter_step():
    for seed in range(CASES):
        request = drawn(seed)
        placement, best = solve(request), EveryStageShape(request).best()
        if best is None:
            assert placement.objective_value is None
            continue
        assert placement.objective_value == pytest.approx(best, rel=2e-6)
        assert placement.bound <= best * (1 + 1e-9)
        assert placement.status == "optimal" or len(request.profile.layers) > 2


def test_no_cuts_and_numbers_of_replicas_give_a_smaller_bottleneck():
    for seed in range(CASES):
        request = drawn(seed).model_copy(
            update={
                "objective": "throughput",
                "chunks": (6, 12)[seed % 2],
                "batch_size": None,
                "profiles": (),
                "schedule": "1f1b",
                "step_kind": "isolated",
            }
        )
        placement, best = solve(request), smallest_bottleneck(request)
        if best is not None:
            assert placement.objective_value <= best * (1 + 2e-6)
        if placement.method == "replicas by stage":
            assert placement.objective_value == pytest.approx(best, rel=1e-9)


def test_no_order_of_branches_gives_a_shorter_step():
    found = 0
    for seed in range(BRANCHING_CASES):
        request = branching_request(seed)
        others = map(EveryStageShape, in_every_order(request))
        best = min((value for every in others for value in every.by_stage()), default=math.inf)
        placement = solve(request)
        assert placement.bound <= best * (1 + 1e-9)
        assert placement.objective_value <= best * (1 + 2e-6)
        found += placement.method == "replicas by stage"
    assert found


def test_no_order_of_branches_gives_a_smaller_bottleneck():
    for seed in range(BRANCHING_CASES):
        request = branching_request(
            seed,
            objective="throughput",
            chunks=(6, 12)[seed % 2],
            batch_size=None,
            profiles=(),
            schedule="1f1b",
            step_kind="isolated",
        )
        values = map(smallest_bottleneck, in_every_order(request))
        best = min((value for value in values if value is not None), default=math.inf)
        placement = solve(request)
        assert placement.bound <= best * (1 + 1e-9)
        assert placement.objective_value <= best * (1 + 2e-6)
        if placement.method == "replicas by stage":
            assert placement.status == "optimal"
            assert placement.objective_value == pytest.approx(best, rel=2e-6)


def heavy_end(times=(3.0, 1.0), devices=4, chunks=12, **asked):
    """Work of three devices, then a layer whose gradients take long to exchange."""
    given = {"memory_bytes": 10**11, "step_kind": "steady-state", "schedule": "1f1b"}
    request = row(times, devices=devices, chunks=chunks, replicas="by-stage", **given | asked)
    *light, last = request.profile.layers
    last = last.model_copy(update={"grad_bytes": HEAVY, "param_bytes": HEAVY})
    links = [
        link.model_copy(update={"bandwidth_bytes_per_s": RATE}) for link in request.cluster.links
    ]
    return request.model_copy(
        update={
            "profile": request.profile.model_copy(update={"layers": (*light, last)}),
            "cluster": request.cluster.model_copy(update={"links": tuple(links)}),
        }
    )


def test_layers_with_large_gradients_have_one_device():
    request = heavy_end()
    placement = solve(request)
    assert placement.replicas_by_stage == (3, 1)
    assert placement.status == "optimal"
    assert list(placement.layer_devices.values()) == ["d0", "d3"]
    assert placement.replicas == {
        "d0": tuple(Replica(device=name, samples=1) for name in ("d0", "d1", "d2"))
    }
    assert (placement.batch_size, placement.chunks) == (3, 4)


def test_the_step_of_unlike_numbers_of_replicas_has_a_closed_form():
    # 4 micro-batches of 3 units: every device computes 9 ms of each, and the first stage waits for
    # a unit there and a unit back, as one device sends it to the last stage and that computes three
    request = heavy_end(optimizer_ms=0.6)
    placement = solve(request)
    message_ms = 3 * 1e3 / RATE
    around_ms = (9 + 2 * message_ms) + 4 * 9
    assert placement.step.optimizer_ms == pytest.approx(0.6)
    assert placement.step.steady_state_ms == pytest.approx(around_ms + 0.6 / 3, abs=1e-5)


def test_the_bottleneck_has_the_exchange_of_each_stage():
    request = heavy_end(step_kind="isolated").model_copy(update={"objective": "throughput"})
    layers = [
        layer.model_copy(update={"grad_bytes": min(layer.grad_bytes or 10 * MB, HEAVY)})
        for layer in request.profile.layers
    ]
    profile = request.profile.model_copy(update={"layers": tuple(layers)})
    placement = solve(request.model_copy(update={"profile": profile}))
    assert placement.replicas_by_stage == (3, 1)
    exchange_ms = 1e3 * 10 * MB * (2 / 3) * (2 / RATE + 3 / ADD_BYTES_PER_S)
    first = 9 / 3 + exchange_ms / 12
    assert placement.objective_value == pytest.approx(first, rel=1e-6)


def test_each_replica_has_the_memory_of_its_units():
    request = heavy_end(saved_bytes=MB, optimizer_ms=0.6)
    layers = [
        layer.model_copy(update={"optimizer_bytes": 2 * MB}) for layer in request.profile.layers
    ]
    profile = request.profile.model_copy(update={"layers": tuple(layers)})
    placement = solve(request.model_copy(update={"profile": profile}))
    first, *_, last = placement.devices
    # two micro-batches in flight on the first stage, of one unit; one on the last, of three units
    assert placement.in_flight == (2, 1)
    assert 2 * MB <= first.memory.activation_bytes < 2.1 * MB
    assert 3 * MB <= last.memory.activation_bytes < 3.1 * MB
    assert first.memory.optimizer_bytes == math.ceil(2 * MB / 3)
    assert last.memory.optimizer_bytes == 2 * MB


def test_numbers_of_replicas_differ_only_if_asked_for():
    placement = solve(heavy_end().model_copy(update={"replicas": "auto"}))
    assert len(set(placement.replicas_by_stage)) == 1


def test_the_choices_name_the_replicas_of_each_stage():
    choices = solve(heavy_end()).step.choices
    assert (3, 1) in {choice.replicas_by_stage for choice in choices}


def test_unlike_devices_have_equal_numbers_of_replicas():
    request = heavy_end()
    devices = [device.model_copy() for device in request.devices]
    devices[0] = devices[0].model_copy(update={"memory_bytes": 2 * 10**11})
    cluster = request.cluster.model_copy(update={"devices": tuple(devices)})
    placement = solve(request.model_copy(update={"cluster": cluster}))
    assert len(set(placement.replicas_by_stage)) == 1


def test_max_devices_counts_the_replicas_of_all_stages():
    placement = solve(heavy_end(constraints=Constraints(max_devices=3)))
    assert sum(placement.replicas_by_stage) <= 3


def test_a_skip_connection_may_pass_a_stage():
    request = heavy_end(times=(1.0, 1.0, 1.0, 1.0), devices=3)
    skip = request.profile.edges[0].model_copy(update={"targets": ("l1", "l3")})
    edges = (skip, *request.profile.edges[1:])
    profile = request.profile.model_copy(update={"edges": edges})
    placement = solve(request.model_copy(update={"profile": profile}))
    assert placement.replicas_by_stage == (2, 1)


def test_large_stages_are_within_a_host():
    request = heavy_end()
    devices = [
        device.model_copy(update={"host": host})
        for device, host in zip(request.devices, "abbb", strict=True)
    ]
    links = [
        link.model_copy(update={"bandwidth_bytes_per_s": RATE / (100 if "d0" in ends else 1)})
        for link in request.cluster.links
        for ends in [(link.source, link.target)]
    ]
    profile = request.profile.model_copy(
        update={
            "layers": tuple(
                layer.model_copy(update={"grad_bytes": layer.grad_bytes or 10 * MB})
                for layer in request.profile.layers
            )
        }
    )
    cluster = request.cluster.model_copy(update={"devices": tuple(devices), "links": tuple(links)})
    placement = solve(request.model_copy(update={"cluster": cluster, "profile": profile}))
    assert placement.replicas_by_stage == (3, 1)
    assert [replica.device for replica in placement.replicas["d1"]] == ["d1", "d2", "d3"]


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        (lambda p: {"replicas": {"d0": p.replicas["d0"][:2]}}, "compute 2 samples"),
        (lambda p: {"objective_value": p.objective_value * 0.9}, "objective_value"),
        (lambda p: {"batch_size": 6, "replicas": _twice(p)}, "6 samples are not 3 units"),
        (lambda p: {"in_flight": (1, 1)}, "in_flight"),
        (lambda p: {"stages": p.stages[::-1]}, "a value runs backwards"),
        (lambda p: {"devices": p.devices[::-1]}, "devices"),
        (lambda p: {"recompute": ("d0",)}, "some replicas of a stage recompute"),
    ],
)
def test_the_referee_refuses_what_is_not_so(changed, fault):
    request = heavy_end()
    placement = solve(request)
    claimed = {**placement.model_dump(), **changed(placement)}
    with pytest.raises((PlacementError, ValueError), match=fault):
        check(request, type(placement).model_validate(claimed))


def _twice(placement):
    return {
        name: tuple(one.model_copy(update={"samples": 2 * one.samples}) for one in members)
        for name, members in placement.replicas.items()
    }


def test_the_referee_refuses_unlike_numbers_that_were_not_asked_for():
    request = heavy_end()
    placement = solve(request)
    asked = request.model_copy(update={"replicas": "auto"})
    claimed = placement.model_copy(update={"id": asked.content_hash()})
    with pytest.raises(PlacementError, match="unlike numbers of replicas, unasked"):
        check(asked, claimed)
