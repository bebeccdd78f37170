"""What unlike devices can share at best, against every assignment and closed forms."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_requests import examples

from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver.bounds.work_sharing import least_work, prices_of_work
from placer.solver.problem import Problem
from placer.solver.reduce import reduced

SETTINGS = examples(150)
MS = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 7.25])


def problem_of(times_ms, **rules):
    """Return a row of layers, and by device a time of each."""
    names = [f"d{device}" for device in range(len(times_ms))]
    layers = [
        Layer(name=f"l{index}", forward_ms=dict(zip(names, times, strict=True)))
        for index, times in enumerate(zip(*times_ms, strict=True))
    ]
    cluster = Cluster(
        devices=[Device(name=name, type=name, memory_bytes=100) for name in names],
        links=[
            Link(source=a, target=b, bandwidth_bytes_per_s=1e3)
            for a, b in itertools.permutations(names, 2)
        ],
    )
    edges = [
        Edge(source=f"l{index}", targets=(f"l{index + 1}",), bytes=0)
        for index in range(len(layers) - 1)
    ]
    profile = Profile(layers=layers, edges=edges, cluster=cluster)
    return Problem.from_request(PlacementRequest(profile=profile, constraints=Constraints(**rules)))


@SETTINGS
@given(data=st.data())
def test_every_assignment_has_a_device_with_as_much_to_do_and_to_wait_for(data):
    devices, layers = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 5))
    times_ms = [data.draw(st.lists(MS, min_size=layers, max_size=layers)) for _ in range(devices)]
    most = data.draw(st.integers(1, devices))
    waits_ms = sorted(data.draw(st.lists(MS, min_size=layers, max_size=layers)))
    pin = {"l0": "d0"} if data.draw(st.booleans()) else {}
    problem = problem_of(times_ms, max_devices=most, pinned=pin)
    bound = least_work(problem, reduced(problem), problem.compute_ms, waits_ms)
    least = min(
        max(
            sum(times_ms[d][n] for n, at in enumerate(where) if at == d) + wait
            for d, wait in waiting
        )
        for where in itertools.product(range(devices), repeat=layers)
        if len(set(where)) <= most and not (pin and where[0])
        for order in itertools.permutations(sorted(set(where)))
        for waiting in [list(zip(order, waits_ms, strict=False))]
    )
    assert bound <= least * (1 + 1e-9)


def test_a_device_twice_as_fast_takes_two_thirds():
    problem = problem_of([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]])
    assert least_work(problem, reduced(problem), problem.compute_ms) == pytest.approx(4.0)


def test_each_does_what_it_is_best_at():
    problem = problem_of([[1.0, 9.0, 3.0], [9.0, 1.0, 3.0]])
    # the largest alone
    assert least_work(problem, reduced(problem), problem.compute_ms) == pytest.approx(3.0)
    assert sum(prices_of_work([(1, [1.0, 9.0, 3.0]), (1, [9.0, 1.0, 3.0])])) == pytest.approx(2.5)


def test_the_second_device_waits_for_what_the_first_does_before():
    # 18 ms of work, and 2 and 4 ms before two devices can begin: (18 + 2 + 4) / 3, or on two (18 +
    # 2) / 2.
    problem = problem_of([[3.0] * 6] * 3)
    assert least_work(
        problem, reduced(problem), problem.compute_ms, [0.0, 2.0, 4.0]
    ) == pytest.approx(8.0)
    assert least_work(
        problem, reduced(problem), problem.compute_ms, [0.0, 2.0, 40.0]
    ) == pytest.approx(10.0)


def test_a_layer_that_only_one_device_may_have_counts_there():
    problem = problem_of([[4.0, 4.0], [4.0, 4.0]], pinned={"l0": "d0", "l1": "d0"})
    assert least_work(problem, reduced(problem), problem.compute_ms) == pytest.approx(8.0)
