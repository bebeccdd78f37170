"""The solver on requests of real machines: nothing is better, bounds hold, answers check."""

import pytest
from enumeration import brute_force
from every_step import Steps
from measured_requests import measured_request

from placer.report.explain import explain
from placer.report.page import html_report
from placer.schema import Placement
from placer.solver.check import check
from placer.solver.solve import solve


def told(request):
    """Return the answer, after all that is done with one."""
    placement = solve(request)
    again = Placement.model_validate_json(placement.to_json())
    assert again == placement
    check(request, again)
    assert explain(placement) and html_report(placement, request.profile)
    return placement


def holds(placement, best):
    """Return whether an answer agrees with the best there is, however little was searched."""
    if best is None:
        return not placement.layer_devices
    bounded = placement.bound is None or placement.bound <= best * (1 + 1e-9)
    within = placement.objective_value is None or placement.objective_value >= best * (1 - 1e-9)
    return placement.status != "infeasible" and bounded and within


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_no_step_is_shorter_and_the_bound_holds(first):
    for seed in range(first, first + 10):
        request = measured_request(seed, ["step"])
        assert holds(told(request), min(Steps(request).all(), default=None)), seed


@pytest.mark.parametrize("objective", ["throughput", "latency", "memory"])
def test_no_other_objective_is_smaller_and_the_bound_holds(objective):
    for seed in range(12):
        request = measured_request(seed, [objective])
        rules = request.constraints.model_copy(update={"recompute": "never"})
        request = request.model_copy(update={"constraints": rules})
        placement = told(request)
        assert holds(placement, brute_force(request, placement.contiguous)), seed
