"""The search in which pairs of devices redivide their nodes."""

import itertools

import pytest
from hypothesis import assume, given
from small_requests import examples, small_requests

from placer.schema import Constraints
from placer.solver import costs
from placer.solver.bounds import memory_bounds
from placer.solver.free import pair_search, pair_sweep
from placer.solver.problem import Problem
from placer.solver.reduce import reduced
from placer.solver.solve import solve

FREE = Constraints(contiguous=False)


def every_placement(problem):
    """Return each assignment that meets all requirements, and its bottleneck."""
    for devices in itertools.product(range(len(problem.devices)), repeat=len(problem.layers)):
        result = costs.evaluate(problem, devices) if costs.allowed(problem, devices) else None
        if result is not None and costs.fits(problem, result):
            yield result.objective_value, list(devices)


def improved(problem, start, over, enough=0.0):
    return pair_search.PairSearch(problem, reduced(problem)).improved(start, over, enough)


@examples(60)
@given(asked=small_requests(objectives=("throughput",)))
def test_from_the_worst_placement_the_best_of_two_devices_is_found(asked):
    rules = asked.constraints.model_copy(update={"contiguous": False})
    problem = Problem.from_request(
        asked.model_copy(update={"constraints": rules, "transfers": "added"})
    )
    assume(pair_search.applies(problem, reduced(problem)))
    placements = sorted(every_placement(problem))
    assume(placements)
    found = improved(problem, placements[-1][1], lambda work: False)
    result = costs.evaluate(problem, found)
    assert costs.allowed(problem, found) and costs.fits(problem, result)
    assert result.objective_value <= placements[-1][0]
    room_is_known = not memory_bounds.can_bind(problem) or memory_bounds.holds_state_alone(problem)
    any_numbers = problem.most_layers is None and problem.least_devices == 1
    # else there is room for what there was at the last look
    if len(problem.devices) == 2 == problem.most_devices and room_is_known and any_numbers:
        assert result.objective_value == pytest.approx(placements[0][0], rel=1e-5, abs=1e-9)


def test_loads_of_five_devices_become_even(chain):
    problem = Problem.from_request(chain([1.0] * 20, devices=5, constraints=FREE))
    found = improved(problem, [0] * 20, lambda work: False)
    assert sorted(found.count(device) for device in range(5)) == [4] * 5


def test_what_no_pair_makes_better_is_found_from_other_placements(chain):
    # 8 6 | 4 2 7 | 3 9: neither of the others can take anything from the first, all three together
    # come to 13.
    problem = Problem.from_request(chain([8.0, 6, 4, 2, 7, 3, 9], devices=3, constraints=FREE))
    found = improved(problem, [0, 0, 1, 1, 1, 2, 2], lambda work: False)
    assert costs.evaluate(problem, found).objective_value == 13.0


def test_devices_that_take_no_time_are_not_divided_for_ever(chain):
    problem = Problem.from_request(chain([0.0] * 6, devices=2, constraints=FREE))
    start = [0, 1, 0, 1, 1, 0]
    found = improved(problem, start, lambda work: False)
    assert costs.allowed(problem, found) and costs.evaluate(problem, found).objective_value == 0.0


def test_no_device_gets_more_than_it_can_hold(chain):
    asked = chain([1.0] * 6, devices=3, param_bytes=10, memory_bytes=25, constraints=FREE)
    problem = Problem.from_request(asked)
    found = improved(problem, [0, 0, 1, 1, 2, 2], lambda work: False)
    assert costs.fits(problem, costs.evaluate(problem, found))


@pytest.mark.parametrize(
    ("rules", "value_bytes", "start", "best_ms"),
    [
        ({"max_layers": 2}, 0, [0, 0, 1, 1, 2], 4),
        ({"max_devices": 2}, 0, [0, 0, 0, 1, 1], 4),
        # whatever is in the middle pays for two transfers
        ({"min_devices": 3}, 10, [0, 1, 0, 2, 2], 21),
    ],
)
def test_devices_and_their_layers_are_as_many_as_is_asked(
    chain, rules, value_bytes, start, best_ms
):
    rules = Constraints(contiguous=False, **rules)
    problem = Problem.from_request(
        chain([4, 1, 1, 1, 1], devices=3, value_bytes=value_bytes, constraints=rules)
    )
    found = improved(problem, start, lambda work: False)
    assert costs.judged(problem, found).objective_value == best_ms


def test_a_search_that_is_over_returns_its_start(chain):
    problem = Problem.from_request(chain([1.0] * 8, devices=4, constraints=FREE))
    found = improved(problem, [0] * 8, lambda work: True)
    result = costs.evaluate(problem, found)
    assert costs.allowed(problem, found) and result.objective_value <= 8.0


def test_it_ends_where_nothing_is_smaller(chain):
    problem = Problem.from_request(chain([1.0] * 8, devices=4, constraints=FREE))
    looks = []
    improved(
        problem,
        [0, 0, 1, 1, 2, 2, 3, 3],
        lambda work: looks.append(1),
        enough=2.0,
    )
    assert len(looks) <= 3


def test_the_same_is_found_twice(chain):
    times = [1.0 + 0.37 * (i * i % 11) for i in range(24)]
    problem = Problem.from_request(chain(times, devices=4, value_bytes=1, constraints=FREE))
    start = [layer // 6 for layer in range(24)]
    first = improved(problem, start, lambda work: False)
    assert first == improved(problem, start, lambda work: False)


def test_it_goes_on_where_it_was_stopped_until_patience_is_over(chain):
    # Stopped at every tenth look, it takes about as many in all, and none more when it has ended by
    # itself.
    times = [1.0 + 0.37 * (i * i % 11) for i in range(12)]
    problem = Problem.from_request(chain(times, devices=3, value_bytes=1, constraints=FREE))
    start, looks, stopped = [layer // 4 for layer in range(12)], [], []
    at_once = improved(problem, start, lambda work: bool(looks.append(work)))
    search, found = pair_search.PairSearch(problem, reduced(problem)), start
    for _ in range(len(looks)):
        found = search.improved(found, lambda work: stopped.append(work) or len(stopped) % 10 == 0)
    assert 0.5 * len(looks) < len(stopped) < 2 * len(looks)
    assert (
        costs.evaluate(problem, found).objective_value
        == costs.evaluate(problem, at_once).objective_value
    )


def test_it_goes_on_from_a_better_placement_that_others_found(chain):
    problem = Problem.from_request(chain([1.0] * 20, devices=5, constraints=FREE))
    search = pair_search.PairSearch(problem, reduced(problem))
    search.improved([0] * 20, lambda work: True)
    even = [layer // 4 for layer in range(20)]
    assert costs.evaluate(problem, search.improved(even, lambda work: True)).objective_value == 4.0


def test_where_sweeps_are_too_wide_the_program_finds_the_best(chain, monkeypatch):
    monkeypatch.setattr(pair_sweep, "MOST_STATES", 0)
    times = [1.0 + 0.37 * (i * i % 11) for i in range(12)]
    asked = chain(times, devices=3, value_bytes=1, constraints=FREE)
    problem, start = Problem.from_request(asked), [0] * 12
    assert improved(problem, start, lambda work: False) is None
    assert solve(asked).status == "optimal"
