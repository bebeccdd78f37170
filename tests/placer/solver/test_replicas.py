"""Replicas: shapes, shares and their exchange, against every answer that there could be."""

import itertools
import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from enumeration import brute_force
from replicated_steps import MB, EveryShape, drawn_request, part_of_optimizer
from rows import row
from small_requests import SHARE

from placer.errors import PlacementError
from placer.schedule.gradient_pieces import ADD_BYTES_PER_S, gradient_pieces
from placer.schema import Cluster, Constraints, Device, Link, Rate, Replica
from placer.solver.check import check
from placer.solver.problem import Problem
from placer.solver.replicas import uneven_shares
from placer.solver.replicas.replica_shapes import shapes
from placer.solver.replicas.replication import profile_of_share
from placer.solver.replicas.uneven_shares import _fairest
from placer.solver.solve import predict_pipelines, solve

CASES = math.ceil(600 * SHARE)
UNLIKE_CASES = math.ceil(300 * SHARE)
LARGE = 100 * MB


def hold_against_every_shape(request):
    placement = solve(request)
    best = EveryShape(request).best()
    if best is None:
        assert placement.status == "infeasible"
        return
    assert placement.status == "optimal"
    assert placement.objective_value == pytest.approx(best, rel=2e-6)
    assert placement.bound <= best * (1 + 1e-9)


def test_no_number_of_replicas_and_no_assignment_is_better():
    for seed in range(CASES):
        hold_against_every_shape(drawn_request(seed))


def test_of_a_given_map_the_same_is_predicted_as_when_it_was_found():
    seen = 0
    for seed in range(math.ceil(200 * SHARE)):
        request = drawn_request(seed)
        placement = solve(request)
        if not placement.replicas:
            continue
        again = predict_pipelines(request, placement)
        for name in ("objective_value", "devices", "replicas", "batch_size", "recompute", "id"):
            assert getattr(again, name) == getattr(placement, name), name
        unproven = {"choices": ()}
        assert again.step.model_copy(update=unproven) == placement.step.model_copy(update=unproven)
        seen += 1
    assert seen >= 1


def test_nothing_is_predicted_of_replicas_that_do_not_fit():
    request = drawn_request(2, constraints=Constraints())
    placement = solve(request)
    assert placement.replicas
    small = [one.model_copy(update={"memory_bytes": 1}) for one in request.devices]
    cluster = request.placed_on.model_copy(update={"devices": tuple(small)})
    assert predict_pipelines(request.model_copy(update={"cluster": cluster}), placement) is None
    cluster = request.placed_on.model_copy(update={"links": ()})
    assert predict_pipelines(request.model_copy(update={"cluster": cluster}), placement) is None


def test_no_shares_of_unlike_devices_are_better():
    for seed in range(UNLIKE_CASES):
        hold_against_every_shape(drawn_request(seed, devices=(2, 3), unlike=True))


class EqualShares(EveryShape):
    """Every answer in which replicas have equal shares."""

    def shared(self, asked, members, chunks, shares):
        if len(set(shares)) == 1:
            yield from super().shared(asked, members, chunks, shares)


def requests_of_whole_copies():
    """Requests of unlike devices, two of which have to hold the whole model."""
    for seed in range(UNLIKE_CASES):
        request = drawn_request(seed, devices=(2, 3), unlike=True)
        names = tuple(layer.name for layer in request.profile.layers)
        together = (names,) if len(names) > 1 else ()
        rules = Constraints(colocated=together, min_devices=2)
        if len({device.type for device in request.devices}) > 1:
            yield request.model_copy(update={"constraints": rules})


def has_uneven_shares(placement):
    return any(len({one.samples for one in own}) > 1 for own in placement.replicas.values())


def test_sizes_with_other_parameters_are_not_interpolated():
    tried = 0
    for seed in range(UNLIKE_CASES):
        request = drawn_request(seed, devices=(2, 3), unlike=True)
        largest = max(request.profiles, key=lambda one: one.batch_size, default=None)
        if largest is None or not request.profile.layers[0].grad_bytes:
            continue
        first, *rest = largest.layers
        layers = (first.model_copy(update={"grad_bytes": 0}), *rest)
        other = largest.model_copy(update={"layers": layers})
        profiles = tuple(other if one is largest else one for one in request.profiles)
        found = solve(request.model_copy(update={"profiles": profiles}))
        assert not has_uneven_shares(found)
        tried += 1
    assert tried


def test_replicas_for_another_engine_have_the_best_equal_shares():
    uneven = 0
    for request in requests_of_whole_copies():
        uneven += has_uneven_shares(solve(request))
        found = solve(request.model_copy(update={"for_format": "pipelining"}))
        best = min(EqualShares(request).unlike_devices(), default=None)
        if best is None:
            assert found.status == "infeasible"
            continue
        assert found.objective_value == pytest.approx(best, rel=1e-6)
        assert found.bound <= best * (1 + 1e-9)
        assert "pipelining" in found.export("pipelining").format
    assert uneven >= 1


def test_the_referee_refuses_unequal_shares_for_another_engine():
    request = next(one for one in requests_of_whole_copies() if has_uneven_shares(solve(one)))
    asked = request.model_copy(update={"for_format": "pipelining"})
    uneven = solve(request).model_copy(update={"id": asked.content_hash(), "sharded": None})
    with pytest.raises(PlacementError, match="unequal shares, which pipelining has not"):
        check(asked, uneven)


def test_a_layer_on_two_devices_has_replicas_or_no_placement():
    request = drawn_request(0, devices=(2,)).model_copy(
        update={"constraints": Constraints(min_devices=2), "schedule": "1f1b"}
    )
    layer = request.profile.layers[0]
    alone = request.profile.model_copy(update={"layers": (layer,), "edges": ()})
    request = request.model_copy(update={"profile": alone, "profiles": ()})
    never = solve(request.model_copy(update={"replicas": "never"}))
    assert never.status == "infeasible"
    assert len(solve(request).replicas) == 1


def test_the_fairest_shares_are_found_of_thousands_of_cases():
    for seed in range(3_000):
        random = Random(seed)
        least, sizes = random.choice([1, 2]), random.randint(1, 5)
        costs = [
            np.array([random.choice([1.0, 2.0, 2.5, 4.0, math.inf]) for _ in range(sizes)])
            for _ in range(random.randint(1, 4))
        ]
        total = random.randint(least, 12)
        every = itertools.product(range(least, least + sizes), repeat=len(costs))
        longest = [
            max(own[n - least] for own, n in zip(costs, shares, strict=True))
            for shares in every
            if sum(shares) == total
        ]
        found, shares = _fairest(costs, least, total)
        assert found == min(longest, default=math.inf)
        if found < math.inf:
            reached = [own[n - least] for own, n in zip(costs, shares, strict=True)]
            assert (sum(shares), max(reached)) == (total, found)


def test_the_bottleneck_of_replicas_is_the_smallest_of_every_assignment():
    for seed in range(math.ceil(200 * SHARE)):
        request = throughput_request(Random(seed))
        values = [brute_force(request, contiguous=True)]
        for count in (2, 4):
            if request.chunks % count == 0 and len(request.devices) % count == 0:
                values.append(brute_force(one_pipeline(request, count), contiguous=True) / count)
        assert solve(request).objective_value == pytest.approx(min(values), rel=2e-6)


def throughput_request(random):
    """Two or four devices, and a row of layers with gradients."""
    request = row(
        [random.choice([0.5, 1.0, 2.5]) for _ in range(random.randint(1, 4))],
        devices=random.choice([2, 4]),
        chunks=random.choice([1, 2, 3, 4, 8]),
        schedule="1f1b",
        grad_bytes=random.choice([0, MB, LARGE]),
        replicas="auto",
    )
    links = [
        link.model_copy(update={"bandwidth_bytes_per_s": 1e10}) for link in request.cluster.links
    ]
    cluster = request.cluster.model_copy(update={"links": tuple(links)})
    return request.model_copy(update={"objective": "throughput", "cluster": cluster})


def one_pipeline(request, count):
    """What one of several pipelines is asked for, with the exchange in its backward passes."""
    rate = request.cluster.links[0].bandwidth_bytes_per_s
    part = (count - 1) / count
    byte_ms = 1e3 * part * (2 / rate + 3 / ADD_BYTES_PER_S)
    chunks = request.chunks // count
    profile = part_of_optimizer(request.profile, count)
    layers = [
        layer.model_copy(
            update={
                "backward_ms": {"t": layer.backward_ms["t"] + layer.grad_bytes * byte_ms / chunks}
            }
        )
        for layer in profile.layers
    ]
    devices = request.devices[: len(request.devices) // count]
    return request.model_copy(
        update={
            "profile": profile.model_copy(update={"layers": tuple(layers)}),
            "cluster": request.cluster.model_copy(update={"devices": devices}),
            "chunks": chunks,
        }
    )


# What is chosen


def step_request(**asked):
    """Eight layers of 3 ms on four devices, and 8 micro-batches."""
    given = {"devices": 4, "chunks": 8, "grad_bytes": LARGE, "step_kind": "steady-state"}
    given = {"memory_bytes": 10_000 * MB} | given | asked
    return row([1.0] * 8, **given, replicas="auto")


def test_replicas_are_taken_only_if_asked_for():
    request = step_request(schedule="1f1b")
    assert solve(request.model_copy(update={"replicas": "never"})).replicas == {}
    placement = solve(request)
    assert [replica.device for replica in placement.replicas["d0"]] == ["d0", "d1", "d2", "d3"]
    assert (placement.batch_size, placement.chunks, placement.stages) == (4, 2, ("d0",))


def test_data_parallelism_reaches_the_closed_form():
    placement = solve(step_request(schedule="1f1b", optimizer_ms=0.5))
    add_ms = 1e3 * 3 * 0.75 * LARGE / ADD_BYTES_PER_S
    send_ms = 1e3 * 0.75 * LARGE / 1e15
    # of 4 equal reductions, which are shorter than passes, the last one is exposed
    exposed_ms, gather_ms = 2 * (add_ms + send_ms), 8 * send_ms
    expected = 2 * 8 * 3 + exposed_ms + 8 * 0.5 / 4 + gather_ms / 4
    assert placement.objective_value == pytest.approx(expected, rel=1e-9)
    assert placement.step.reduction_ms == pytest.approx(8 * (add_ms + send_ms) + gather_ms)
    assert placement.step.reduction_hidden_ms == pytest.approx(
        6 * (add_ms + send_ms) + gather_ms * 3 / 4
    )


def test_stages_are_replicated_where_one_device_cannot_hold_the_model():
    placement = solve(step_request(schedule="1f1b", memory_bytes=750 * MB))
    assert {len(members) for members in placement.replicas.values()} == {2}
    assert len(placement.stages) == 2


def test_each_replica_holds_a_part_of_the_optimizer_and_a_buffer():
    request = step_request(schedule="1f1b")
    layers = [
        layer.model_copy(update={"optimizer_bytes": 2 * LARGE, "param_bytes": LARGE})
        for layer in request.profile.layers
    ]
    profile = request.profile.model_copy(update={"layers": tuple(layers)})
    placement = solve(request.model_copy(update={"profile": profile}))
    for load in placement.devices:
        assert load.memory.param_bytes == 8 * LARGE
        # the packed parameters of one owner, and two pieces of two layers from three others
        assert load.memory.grad_bytes == 8 * LARGE + 2 * LARGE + 2 * 3 * 2 * LARGE // 4
        assert load.memory.optimizer_bytes == 8 * 2 * LARGE // 4


def test_choices_of_every_number_of_replicas_are_reported():
    placement = solve(step_request(schedule="1f1b"))
    assert {choice.replicas for choice in placement.step.choices} == {1, 2, 4}


def test_placements_that_pin_layers_have_no_replicas():
    placement = solve(step_request(constraints=Constraints(pinned={"l0": "d0"})))
    assert placement.replicas == {}


def test_max_devices_counts_all_replicas():
    placement = solve(step_request(schedule="1f1b", constraints=Constraints(max_devices=2)))
    used = [replica for members in placement.replicas.values() for replica in members]
    assert len(used or placement.stages) <= 2


def test_fast_devices_take_more_samples():
    request = unlike_request()
    placement = solve(request)
    shares = {replica.device: replica.samples for replica in placement.replicas["d0"]}
    assert shares == {"d0": 4, "d1": 4, "d2": 8}
    assert placement.step.measured_batch_sizes == (2, 8)


def test_optimizers_that_were_measured_anew_for_each_size_count_by_size():
    request = unlike_request()

    def with_optimizer(profile, time_ms):
        kinds = dict.fromkeys("tu", time_ms)
        layers = [one.model_copy(update={"optimizer_ms": kinds}) for one in profile.layers]
        return profile.model_copy(update={"layers": tuple(layers)})

    request = request.model_copy(
        update={
            "profile": with_optimizer(request.profile, 1.0),
            "profiles": tuple(with_optimizer(one, 1.1) for one in request.profiles),
        }
    )
    placement = solve(request)  # which checks the answer
    # shares of fewer than 8 samples lie above the size with the longer optimizer
    shares = [replica.samples for replica in placement.replicas["d0"]]
    assert min(shares) < 8
    assert placement.step.optimizer_ms == pytest.approx(8 * 1.1 / len(shares))
    assert placement.bound <= placement.objective_value


def unlike_request():
    """Two slow devices and one that is twice as fast; two measured sizes."""
    request = step_request(devices=3, size=8, chunks=1, batch_size=16, schedule="1f1b")

    def measured(scale, size):
        layers = [
            layer.model_copy(
                update={
                    "forward_ms": {"t": scale, "u": scale / 2},
                    "backward_ms": {"t": 2 * scale, "u": scale},
                }
            )
            for layer in request.profile.layers
        ]
        return request.profile.model_copy(update={"layers": tuple(layers), "batch_size": size})

    devices = list(request.devices)
    devices[2] = devices[2].model_copy(update={"type": "u"})
    cluster = request.cluster.model_copy(update={"devices": tuple(devices)})
    return request.model_copy(
        update={"profile": measured(1.0, 8), "profiles": (measured(0.25, 2),), "cluster": cluster}
    )


def test_a_profile_of_a_share_lies_between_its_neighbours():
    request = unlike_request()
    small, large = request.profiles[0], request.profile
    between = profile_of_share([small, large], 4)
    assert between.layers[0].forward_ms == {"t": 0.5, "u": 0.25}
    assert profile_of_share([small, large], 8) is large


def test_slow_links_between_hosts_carry_what_takes_less_time():
    """Gradients are large: each host holds all replicas of a stage, and values cross."""
    request = on_two_hosts(step_request(schedule="1f1b", memory_bytes=750 * MB))
    placement = solve(request)
    pairs = {tuple(one.device for one in members) for members in placement.replicas.values()}
    assert pairs == {("d0", "d1"), ("d2", "d3")}


def on_two_hosts(request):
    devices = [
        device.model_copy(update={"host": "ab"[number // 2]})
        for number, device in enumerate(request.devices)
    ]
    host = {device.name: device.host for device in devices}
    links = [
        link.model_copy(
            update={
                "bandwidth_bytes_per_s": 1e11 if host[link.source] == host[link.target] else 1e9
            }
        )
        for link in request.cluster.links
    ]
    return request.model_copy(update={"cluster": Cluster(devices=devices, links=links)})


@pytest.mark.parametrize("objective", ["step", "throughput"])
def test_gradients_go_where_replicas_exchange_them_fast(objective):
    # The devices of a pipeline are alike but for their replicas: first the links between d0 and d2
    # are slow, then those between d1 and d3. One device alone cannot hold the model.
    found = []
    for slow in (0, 1):
        asked = row(
            [3.0, 3.0],
            devices=4,
            chunks=8,
            schedule="1f1b",
            grad_bytes=0,
            memory_bytes=3_000 * MB,
            replicas="auto",
        )
        heavy, light = (
            layer.model_copy(update={"grad_bytes": gradients, "param_bytes": size})
            for layer, gradients, size in zip(
                asked.profile.layers, (900 * MB, 0), (500 * MB, 2_000 * MB), strict=True
            )
        )
        ends = {f"d{slow}", f"d{slow + 2}"}
        links = [
            link.model_copy(
                update={
                    "bandwidth_bytes_per_s": 1e9 if {link.source, link.target} == ends else 1e11
                }
            )
            for link in asked.cluster.links
        ]
        changed = {
            "profile": asked.profile.model_copy(update={"layers": (heavy, light)}),
            "cluster": asked.cluster.model_copy(update={"links": tuple(links)}),
            "objective": objective,
        }
        found.append(solve(asked.model_copy(update=changed)))
    first, other = found
    assert len(first.replicas) == len(other.replicas) == 2
    assert first.objective_value == pytest.approx(other.objective_value)


def test_devices_that_no_number_divides_form_no_equal_pipelines():
    assert [shape.replicas for shape, _ in shapes(step_request(devices=3, batch_size=12))] == [3]
    unlike = unlike_request()
    assert list(shapes(unlike)) == []


def test_a_stage_is_cut_into_pieces_of_about_equal_gradients():
    even = [range(6, 8), range(4, 6), range(2, 4), range(0, 2)]
    assert gradient_pieces([1] * 8, [0] * 8) == even
    assert gradient_pieces([5, 0, 0, 1], [0] * 4) == [range(1, 4), range(0, 1)]
    assert gradient_pieces([0, 0], [0, 0]) == []


def test_reductions_take_the_rates_of_links_that_are_busy_both_ways():
    slow = Rate(bandwidth_bytes_per_s=1e9)
    request = step_request(schedule="1f1b")
    links = [link.model_copy(update={"bidirectional": slow}) for link in request.cluster.links]
    cluster = request.cluster.model_copy(update={"links": tuple(links)})
    slower = solve(request.model_copy(update={"cluster": cluster}))
    assert slower.objective_value > solve(request).objective_value


def test_it_is_infeasible_if_no_shape_fits():
    placement = solve(step_request(memory_bytes=MB))
    assert placement.status == "infeasible" and placement.infeasible.reason


def test_better_placements_are_reported_on_the_way():
    reports = []
    placement = solve(step_request(schedule="1f1b"), progress=reports.append)
    values = [report.objective_value for report in reports]
    assert values == sorted(values, reverse=True)
    last = reports[-1].placement()
    assert last.objective_value == placement.objective_value
    check(step_request(schedule="1f1b"), last)


# What the referee refuses


def tampered(placement, **changes):
    return placement.model_copy(update=changes)


def replicas_of(*members):
    return {members[0][0]: tuple(Replica(device=d, samples=n) for d, n in members)}


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("d0", 1), ("d1", 1), ("d2", 1), ("d3", 2)], "sum of shares"),
        ([("d0", 1), ("d1", 1), ("d2", 1), ("d2", 1)], "several replicas"),
        ([("d1", 1), ("d0", 1), ("d2", 1), ("d3", 1)], "devices of replicas"),
        ([("d0", 1), ("d1", 1), ("d2", 1), ("d9", 1)], "does not have"),
        ([("d0", 4)], "replicas, not equally many"),
        ([("d0", 2), ("d1", 2)], "id|load|layers|chunks|sum|cannot"),
    ],
)
def test_the_referee_refuses_shares_that_cannot_be(members, message):
    request = step_request(schedule="1f1b")
    placement = solve(request)
    with pytest.raises(PlacementError, match=message):
        check(request, tampered(placement, replicas=replicas_of(*members)))


@pytest.mark.parametrize(
    "name", ["reduction_ms", "reduction_hidden_ms", "optimizer_ms", "isolated_ms"]
)
def test_the_referee_refuses_other_times_of_the_exchange(name):
    request = step_request(schedule="1f1b", optimizer_ms=0.5)
    placement = solve(request)
    step = placement.step.model_copy(update={name: getattr(placement.step, name) + 0.25})
    with pytest.raises(PlacementError, match=name):
        check(request, tampered(placement, step=step))


def test_the_referee_refuses_another_objective_and_a_bound_above_it():
    request = step_request(schedule="1f1b")
    placement = solve(request)
    value = placement.objective_value
    with pytest.raises(PlacementError, match="objective_value"):
        check(request, tampered(placement, objective_value=value * 1.01))
    with pytest.raises(PlacementError, match="bound"):
        check(request, tampered(placement, bound=value * 1.01))


def test_the_referee_refuses_replicas_that_were_not_asked_for():
    request = step_request(schedule="1f1b")
    never = request.model_copy(update={"replicas": "never"})
    placement = solve(request).model_copy(update={"id": never.content_hash()})
    with pytest.raises(PlacementError, match="allows none"):
        check(never, placement)


def test_replicas_without_a_link_are_no_shape():
    request = step_request(devices=2, batch_size=8)
    link = Link(source="d0", target="d1", bandwidth_bytes_per_s=1e9)
    devices = [Device(name=f"d{i}", type="t", memory_bytes=10**10) for i in range(2)]
    cluster = Cluster(devices=devices, links=(link,))
    assert list(shapes(request.model_copy(update={"cluster": cluster}))) == []


def test_of_too_many_subsets_the_fastest_devices_are_tried(monkeypatch):
    monkeypatch.setattr(uneven_shares, "MOST_SUBSETS", 1)
    request = unlike_request()
    placement = solve(request)
    assert {replica.device for replica in placement.replicas["d0"]} == {"d0", "d1", "d2"}
    two = request.model_copy(update={"constraints": Constraints(max_devices=2)})
    assert [replica.device for replica in solve(two).replicas["d0"]] == ["d0", "d2"]


def test_a_short_time_limit_gives_an_answer_with_a_bound():
    request = step_request(time_limit_s=0.05)
    placement = solve(request)
    assert 0 <= placement.bound <= placement.objective_value


def test_values_between_merged_layers_are_counted_by_the_problem():
    # the search merges layers of large graphs, and the profile does not have these
    problem = Problem.from_request(step_request())
    layers = tuple(
        layer.model_copy(update={"name": f"merged {index}"})
        for index, layer in enumerate(problem.layers)
    )
    assert replace(problem, layers=layers).crossing_bytes == (0, *[1] * 7)
