"""Finer cuts of long orders, against every cut, as the referee judges them."""

import itertools
from math import inf
from random import Random

import pytest

from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver.chain import optimal_cuts
from placer.solver.problem import Problem
from placer.solver.reduce import reduced
from placer.solver.referee.loads import busiest_ms
from placer.solver.referee.memory import Memory
from placer.solver.solve import solve


def row(random, layers, devices, memory_bytes=1_000, **asked):
    """Return a request for layers in a row, some with a skip, with links of 1 byte per ms."""
    names = [f"l{index}" for index in range(layers)]
    skips = [
        (one, other) for one in range(layers) for other in (one + 2, one + 3) if other < layers
    ]
    ends = [*itertools.pairwise(range(layers)), *random.sample(skips, len(skips) // 4)]
    held = [f"d{index}" for index in range(devices)]
    profile = Profile(
        layers=[
            Layer(
                name=name,
                forward_ms={"t": random.uniform(0.5, 3)},
                param_bytes=random.randint(1, 5),
            )
            for name in names
        ],
        edges=[
            Edge(source=names[one], targets=[names[other]], bytes=random.choice((0, 0, 1, 3)))
            for one, other in ends
        ],
        cluster=Cluster(
            devices=[Device(name=name, type="t", memory_bytes=memory_bytes) for name in held],
            links=[
                Link(source=a, target=b, bandwidth_bytes_per_s=1e3)
                for a, b in itertools.permutations(held, 2)
            ],
        ),
    )
    return PlacementRequest(profile=profile, constraints=Constraints(contiguous=True), **asked)


def best_of_all_cuts(request):
    """Return the smallest bottleneck of the cuts that fit."""
    names, held = (
        [layer.name for layer in request.profile.layers],
        [device.name for device in request.devices],
    )
    best = inf
    for number in range(1, len(held) + 1):
        for inner in itertools.combinations(range(1, len(names)), number - 1):
            stages = itertools.pairwise((0, *inner, len(names)))
            where = {
                name: held[place]
                for place, stage in enumerate(stages)
                for name in names[slice(*stage)]
            }
            memory = Memory(request, where, contiguous=True)
            if all(
                memory.total(device.name, 1) <= device.usable_bytes for device in request.devices
            ):
                best = min(best, busiest_ms(request, where))
    return best


@pytest.fixture
def of_four_runs(monkeypatch):
    """Orders of more than four nodes are first cut between runs."""
    monkeypatch.setattr(optimal_cuts, "MOST_NODES", 4)


def cuts(problem, nodes, left_s=inf):
    first = optimal_cuts.best_cut(problem, nodes)
    return first, list(optimal_cuts.finer_cuts(problem, nodes, first.devices, lambda: left_s))


@pytest.mark.covering
@pytest.mark.parametrize("memory_bytes", [1_000, 18], ids=["room", "little room"])
@pytest.mark.parametrize("seed", range(15))
def test_the_last_cut_is_the_best_of_all_and_proven(seed, memory_bytes, of_four_runs):
    request = row(Random(seed), layers=11, devices=3, memory_bytes=memory_bytes)
    problem = Problem.from_request(request)
    _, found = cuts(problem, reduced(problem))
    best = best_of_all_cuts(request)
    if best < inf:
        assert found[-1].value == found[-1].bound == pytest.approx(best)
    else:
        assert not found


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("seed", range(15))
def test_where_runs_stay_few_each_cut_is_better_than_the_one_before(
    seed, of_four_runs, monkeypatch
):
    monkeypatch.setattr(optimal_cuts, "MOST_RUNS", 8)
    request = row(Random(seed), layers=40, devices=3)
    problem = Problem.from_request(request)
    first, found = cuts(problem, reduced(problem))
    names, held = (
        [layer.name for layer in problem.layers],
        [device.name for device in problem.devices],
    )
    values = [
        busiest_ms(request, dict(zip(names, (held[d] for d in cut.devices), strict=True)))
        for cut in found
    ]
    assert values == pytest.approx([cut.value for cut in found])
    assert values == sorted(set(values), reverse=True)
    # sums differ in their last digits
    assert values[0] < first.value or values[0] == pytest.approx(first.value)
    assert not any(cut.bound for cut in found)


def test_some_cut_between_few_runs_is_made_better(of_four_runs, monkeypatch):
    monkeypatch.setattr(optimal_cuts, "MOST_RUNS", 8)
    problem = Problem.from_request(row(Random(0), layers=40, devices=3))
    first, found = cuts(problem, reduced(problem))
    assert found[-1].value < first.value


def test_a_cut_is_found_where_none_between_the_first_runs_fits(of_four_runs):
    problems = [
        Problem.from_request(row(Random(seed), layers=11, devices=3, memory_bytes=15))
        for seed in range(30)
    ]
    both = [cuts(problem, reduced(problem)) for problem in problems]
    assert any(first.devices is None and found for first, found in both)


def test_without_time_there_is_no_cut(of_four_runs):
    problem = Problem.from_request(row(Random(0), layers=11, devices=3))
    assert not cuts(problem, reduced(problem), left_s=0.0)[1]


def test_an_order_of_few_nodes_was_looked_at_already():
    problem = Problem.from_request(row(Random(0), layers=11, devices=3))
    assert not cuts(problem, reduced(problem))[1]


@pytest.mark.parametrize("reach", [1, 2, 6, 31, 200])
@pytest.mark.parametrize("most", [0, 1, 4, 28, 300])
def test_distances_rise_from_beside_a_border_to_the_end_of_its_neighbourhood(reach, most):
    steps = optimal_cuts._steps(reach, most)
    assert len(steps) == max(1, min(most, reach))
    assert steps[-1] == reach
    assert all(one < other for one, other in itertools.pairwise(steps))


def bottleneck_of_a_chain(request):
    """By a plain recursion over the number of devices and the end."""
    times = [layer.forward_ms["t"] for layer in request.profile.layers]
    # at each border, of 1 byte per ms
    sent = [0.0, *(float(edge.bytes) for edge in request.profile.edges), 0.0]
    count, done = len(times), [0.0, *itertools.accumulate(times)]
    best = [0.0] + [inf] * count
    for _ in request.devices:
        best = [
            min(
                [
                    best[end],
                    *(
                        max(best[at], done[end] - done[at] + sent[at] + sent[end])
                        for at in range(end)
                    ),
                ]
            )
            for end in range(count + 1)
        ]
    return best[count]


def test_a_chain_of_more_nodes_than_are_cut_at_once_is_proven():
    random = Random(1)
    names, held = [f"l{index}" for index in range(optimal_cuts.MOST_NODES + 40)], ["d0", "d1", "d2"]
    profile = Profile(
        layers=[Layer(name=name, forward_ms={"t": random.uniform(0.5, 3)}) for name in names],
        edges=[
            Edge(source=a, targets=[b], bytes=random.randint(1, 40))
            for a, b in itertools.pairwise(names)
        ],
        cluster=Cluster(
            devices=[Device(name=name, type="t", memory_bytes=10**6) for name in held],
            links=[
                Link(source=a, target=b, bandwidth_bytes_per_s=1e3)
                for a, b in itertools.permutations(held, 2)
            ],
        ),
    )
    request = PlacementRequest(profile=profile, time_limit_s=120)
    placement = solve(request)
    assert placement.status == "optimal"
    assert placement.objective_value == pytest.approx(bottleneck_of_a_chain(request))
