"""The solver against every assignment, on thousands of random small requests.

The requests combine all features.
"""

import pytest
from enumeration import brute_force
from hypothesis import given
from hypothesis import strategies as st
from small_requests import examples, small_requests

from placer.solver.check import check
from placer.solver.problem import Problem
from placer.solver.solve import Portfolio

SETTINGS = examples(700)


@pytest.mark.parametrize("objective", ["throughput", "latency", "memory"])
@SETTINGS
@given(data=st.data())
def test_no_assignment_is_better_and_the_bound_holds(objective, data):
    request = data.draw(small_requests(objectives=(objective,)))
    placement = Portfolio(Problem.from_request(request)).answer()
    check(request, placement)
    best = brute_force(request, placement.contiguous)
    if best is None:
        assert placement.status == "infeasible"
        return
    assert placement.status == "optimal"
    assert placement.objective_value == pytest.approx(best, rel=2e-6)
    assert placement.bound <= best * (1 + 1e-12)
