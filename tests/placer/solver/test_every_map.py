"""What no integer program can tell, of few maps: memory beyond the numbers that it counts in."""

from itertools import product

import pytest

from placer.schema import Constraints, PlacementRequest
from placer.solver import costs, every_map, search
from placer.solver.cpsat.runner import Meter
from placer.solver.problem import Problem
from placer.solver.reduce import reduced
from placer.solver.solve import solve

HUGE = 2**51
OBJECTIVES = ["throughput", "latency", "memory", "devices"]


@pytest.fixture
def huge(chain):
    """``huge(limit, **asked)``.

    Five layers of 2**51 bytes or about that on three devices with such a limit.
    """

    def ask(limit_bytes, objective="throughput", contiguous=True, **asked):
        return chain(
            [1, 2, 3, 4, 5],
            devices=3,
            memory_bytes=limit_bytes,
            param_bytes=[HUGE + 1, HUGE + 1, HUGE - 1, HUGE, 3],
            value_bytes=1,
            objective=objective,
            bottleneck_ms=1e6 if objective == "devices" else None,
            constraints=Constraints(contiguous=contiguous),
            **asked,
        )

    return ask


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_few_maps_that_all_lack_bytes_are_told_to_be_none(huge, objective, contiguous):
    request = huge(2 * HUGE, objective, contiguous)
    problem = Problem.from_request(replace_objective(request))
    assert all(costs.judged(problem, devices) is None for devices in product(range(3), repeat=5))
    placement = solve(request)
    assert placement.status == "infeasible" and placement.infeasible.missing_bytes > 0
    assert "no placement keeps every device within its memory" in placement.infeasible.reason


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_best_of_few_maps_is_proven(huge, objective):
    request = huge(2 * HUGE + 2, objective)
    problem = Problem.from_request(replace_objective(request))
    found = [costs.judged(problem, devices) for devices in product(range(3), repeat=5)]
    best = min(
        (len(one.stages) if objective == "devices" else one.objective_value)
        for one in found
        if one is not None
    )
    placement = solve(request)
    assert placement.status == "optimal" and placement.objective_value == pytest.approx(
        best, rel=1e-12
    )


def test_thousands_of_layers_on_one_device_have_one_map(chain):
    profile = chain([1.0] * 1500, devices=1).profile
    layers = [
        one.model_copy(update={"backward_ms": one.forward_ms, "grad_bytes": 1})
        for one in profile.layers
    ]
    training = profile.model_copy(update={"layers": tuple(layers), "training": True})
    problem = Problem.from_request(PlacementRequest(profile=training))
    assert [*every_map.few(problem, reduced(problem))] == [[0] * 1500]


def replace_objective(request):
    """Return devices are counted by the loads of objective ``throughput``."""
    return (
        request.model_copy(update={"objective": "throughput"})
        if request.objective == "devices"
        else request
    )


def test_maps_are_counted_and_nothing_is_said_when_the_work_is_over(huge):
    problem = Problem.from_request(huge(2 * HUGE))
    looked_at = search.Search(problem, meter=Meter(limit=0.1))
    assert every_map.try_all(looked_at) is None
    assert looked_at.best is None and looked_at.bound == 0 and looked_at.meter.done > 0.1
