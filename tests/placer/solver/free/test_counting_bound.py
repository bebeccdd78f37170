"""The bound by heavy nodes, against every assignment and closed forms."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from small_graphs import least_bottleneck
from small_requests import examples, small_requests

from placer.schema import Constraints
from placer.solver.free.counting_bound import count_bound
from placer.solver.problem import Problem
from placer.solver.reduce import reduced
from placer.solver.solve import Portfolio

SETTINGS = examples(100)
FREE = Constraints(contiguous=False)


def bound(problem, upper):
    return count_bound(problem, reduced(problem, upper), upper, lambda work: False)


def free(asked):
    rules = asked.constraints.model_copy(update={"contiguous": False})
    return Problem.from_request(
        asked.model_copy(update={"constraints": rules, "transfers": "added"})
    )


@SETTINGS
@given(asked=small_requests(objectives=("throughput",)))
def test_no_placement_is_better_than_the_bound(asked):
    problem = free(asked)
    best = least_bottleneck(problem) or 0.0
    assume(best > 0)
    assert bound(problem, best) <= best
    assert bound(problem, 1.5 * best) <= best * (1 + 1e-9)


@SETTINGS
@given(asked=small_requests(objectives=("throughput",)))
def test_nor_where_one_device_pays_for_no_transfer_and_sending_reaches_all(asked):
    problem = replace(free(asked), multicast=True, untaxed=frozenset({0}))
    best = least_bottleneck(problem) or 0.0
    assume(best > 0)
    assert bound(problem, best) <= best
    assert bound(problem, 1.5 * best) <= best * (1 + 1e-9)


def test_of_seven_equal_layers_on_three_devices_one_device_holds_three(chain):
    problem = Problem.from_request(chain([1.0] * 7, devices=3, constraints=FREE))
    assert bound(problem, 4.0) == pytest.approx(3.0, rel=1e-6)


def test_what_it_costs_to_cut_them_off_is_counted(chain):
    # Two of three 4s are on one device, and with them what is between, or both its values: 4 + 1 +
    # 4, and one cut.
    problem = Problem.from_request(
        chain([4.0, 1.0, 4.0, 1.0, 4.0], value_bytes=2, constraints=FREE)
    )
    assert bound(problem, 20.0) == pytest.approx(4 + 1 + 4 + 2, rel=1e-6)


def test_a_device_that_pays_for_nothing_may_hold_some_of_them(chain):
    # A slow third device holds one of seven layers within 4 ms, and another holds three; it holds
    # none if slower.
    problem = Problem.from_request(chain([1.0] * 7, devices=3, constraints=FREE))
    slow = replace(
        problem, untaxed=frozenset({2}), forward_ms=tuple((1.0, 1.0, 2.5) for _ in range(7))
    )
    assert bound(slow, 4.0) == pytest.approx(3.0, rel=1e-6)
    slower = replace(slow, forward_ms=tuple((1.0, 1.0, 5.0) for _ in range(7)))
    assert bound(slower, 4.5) == pytest.approx(4.0, rel=1e-6)


def test_such_a_device_holds_as_many_as_the_known_bottleneck_allows(chain):
    # within 4 ms it holds two of eight layers, and one of the others holds three, not four
    problem = Problem.from_request(chain([1.0] * 8, devices=3, constraints=FREE))
    slow = replace(
        problem, untaxed=frozenset({2}), forward_ms=tuple((1.0, 1.0, 2.0) for _ in range(8))
    )
    assert bound(slow, 4.0) == pytest.approx(3.0, rel=1e-6)


def test_it_ends_when_it_is_over(chain):
    problem = Problem.from_request(chain([1.0] * 7, devices=3, constraints=FREE))
    assert count_bound(problem, reduced(problem, 4.0), 4.0, lambda work: True) == 0.0


def towers(count):
    """Heavy pairs, each held together by a dear value, in a row with cheap layers between."""
    return [time for _ in range(count) for time in (6.0, 5.0, 0.25, 0.25, 0.25)]


def test_large_blocks_are_proven_before_any_placement_is_looked_for(chain):
    """Seven blocks on three devices: one holds three, and what is between them."""
    asked = chain(towers(7), devices=3, value_bytes=1, constraints=FREE)
    placement = Portfolio(Problem.from_request(asked)).answer()
    assert placement.status == "optimal"
    assert bound(Problem.from_request(asked), 60.0) == pytest.approx(
        placement.objective_value, rel=1e-6
    )
