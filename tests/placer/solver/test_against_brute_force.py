"""The solver against trying every assignment, on thousands of random small requests with all features together."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from placer.solver.check import check
from placer.solver.problem import Problem
from placer.solver.solve import Search

SETTINGS = settings(
    max_examples=1400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("objective", ["throughput", "latency", "memory"])
@SETTINGS
@given(data=st.data())
def test_no_assignment_is_better_and_the_bound_holds(objective, data, strategies, brute_force):
    request = data.draw(strategies.requests(objectives=(objective,)))
    placement = Search(Problem.from_request(request)).answer()
    check(request, placement)
    best = brute_force(request, placement.contiguous)
    if best is None:
        assert placement.status == "infeasible"
        return
    assert placement.status == "optimal"
    assert placement.objective_value == pytest.approx(best, rel=2e-6)
    assert placement.bound <= best * (1 + 1e-12)
