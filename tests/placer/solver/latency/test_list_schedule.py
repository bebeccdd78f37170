"""List schedules, against what is known of them."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from small_requests import examples, small_requests

from placer.schema import Constraints
from placer.solver import costs
from placer.solver.latency.list_schedule import list_schedules
from placer.solver.problem import Problem
from placer.solver.reduce import reduced

FREE, CONTIGUOUS = Constraints(contiguous=False), Constraints(contiguous=True)


def best(problem):
    results = [
        costs.judged(problem, devices) for devices in list_schedules(problem, reduced(problem))
    ]
    return min(result.objective_value for result in results if result is not None)


@pytest.mark.parametrize("rules", [FREE, CONTIGUOUS])
def test_the_longest_goes_first_where_nothing_waits(rows, rules):
    """In the given order the last one comes on top of 4 ms; by length it is 6 = 4 + 2 = 3 + 3."""
    assert best(rows([[2.0], [3.0], [3.0], [4.0], [6.0]], devices=3, constraints=rules)) == 6.0


@pytest.mark.parametrize("rules", [FREE, CONTIGUOUS])
def test_rows_are_shared_out_whole_where_transfers_take_long(rows, rules):
    assert best(rows([[1.0] * 4] * 4, devices=4, constraints=rules)) == 4.0


def test_both_passes_count_in_training(rows):
    assert best(rows([[1.0] * 4] * 4, devices=4, training=True, constraints=FREE)) == 12.0


def test_devices_hold_no_more_than_they_may(rows):
    rules = Constraints(contiguous=False, max_layers=3, max_devices=2)
    assert (
        best(rows([[5.0], [1.0], [1.0], [1.0], [1.0], [1.0]], devices=3, constraints=rules)) == 7.0
    )


@examples(300)
@given(data=st.data())
def test_what_is_easy_to_meet_is_met_on_the_way(data):
    # Pins, forbidden devices, groups, most devices and layers, links of what comes later, no
    # cycles.
    problem = Problem.from_request(data.draw(small_requests(objectives=("latency",))))
    nodes = reduced(problem)
    assume(all(nodes.allowed) and problem.least_devices == 1)
    contiguous_or_apart = problem.contiguous or not problem.groups
    for devices in list_schedules(problem, nodes):
        assert costs.allowed(problem, devices)
        assert not contiguous_or_apart or costs.evaluate(problem, devices) is not None
