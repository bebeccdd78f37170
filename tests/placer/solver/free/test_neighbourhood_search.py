"""Large neighbourhood search, against every assignment of two or three devices."""

import itertools
import threading

import pytest
from hypothesis import assume, given
from small_requests import examples, small_requests

from placer.schema import Constraints
from placer.solver import costs
from placer.solver.cpsat.runner import Limits
from placer.solver.free import neighbourhood_search
from placer.solver.problem import Problem

SETTINGS = examples(60)


def limits(work):
    return Limits(time_s=60.0, work=work)


def every_placement(problem):
    """Yield each assignment that meets all requirements, with its bottleneck."""
    for devices in itertools.product(range(len(problem.devices)), repeat=len(problem.layers)):
        result = costs.evaluate(problem, devices) if costs.allowed(problem, devices) else None
        if result is not None and costs.fits(problem, result):
            yield result.objective_value, list(devices)


@SETTINGS
@given(asked=small_requests(objectives=("throughput",)))
def test_from_the_worst_placement_the_best_is_found_where_all_devices_are_a_few(asked):
    rules = asked.constraints.model_copy(update={"contiguous": False})
    problem = Problem.from_request(asked.model_copy(update={"constraints": rules}))
    placements = sorted(every_placement(problem))
    assume(placements)
    found = neighbourhood_search.redivided(problem, placements[-1][1], limits, lambda: False)
    result = costs.evaluate(problem, found)
    assert costs.allowed(problem, found) and costs.fits(problem, result)
    assert result.objective_value == pytest.approx(placements[0][0], rel=1e-5, abs=1e-9)


def test_loads_of_more_devices_than_are_looked_at_together_become_even(chain):
    request = chain([1.0] * 20, devices=5, constraints=Constraints(contiguous=False))
    found = neighbourhood_search.redivided(
        Problem.from_request(request), [0] * 20, limits, lambda: False
    )
    assert sorted(found.count(device) for device in range(5)) == [4] * 5


def test_nothing_is_tried_when_the_time_is_over(chain):
    stop = threading.Event()
    stop.set()
    problem = Problem.from_request(chain([1.0] * 6, constraints=Constraints(contiguous=False)))
    assert neighbourhood_search.redivided(problem, [0] * 6, limits, stop.is_set) == [0] * 6
