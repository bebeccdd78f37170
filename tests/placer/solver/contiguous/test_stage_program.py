"""The integer program in stage-prefix form, by itself."""

import pytest
from enumeration import brute_force
from hypothesis import assume, given
from small_requests import examples, small_requests

from placer.solver import costs
from placer.solver.contiguous import stage_program
from placer.solver.contiguous.stage_program import StageModel
from placer.solver.cpsat.runner import Limits
from placer.solver.problem import Problem
from placer.solver.reduce import reduced

SETTINGS = examples(170)


@SETTINGS
@given(request=small_requests(objectives=("throughput",)))
def test_its_optimum_is_that_of_trying_every_assignment(request):
    problem = Problem.from_request(request)
    assume(stage_program.applies(problem))
    nodes = reduced(problem)
    assume(all(nodes.allowed))
    answer = StageModel(problem, nodes, upper=100.0).solve(Limits(60))
    best = brute_force(request, True)
    if best is None or best > 100.0:
        assert answer.infeasible
        return
    result = costs.evaluate(problem, answer.devices)
    assert costs.fits(problem, result) and costs.allowed(problem, answer.devices)
    assert result.objective_value == pytest.approx(best, rel=2e-6, abs=1e-6)
    assert answer.bound <= best * (1 + 1e-12)


def test_a_bottleneck_that_no_stage_can_keep_is_infeasible(chain):
    problem = Problem.from_request(chain([1.0] * 4))
    assert StageModel(problem, reduced(problem), upper=1.5).solve(Limits(60)).infeasible


def test_devices_of_two_types_are_told_apart(chain):
    request = chain([4.0, 1.0, 1.0])
    layers = [
        layer.model_copy(
            update={"forward_ms": {"t": layer.forward_ms["t"], "slow": 3 * layer.forward_ms["t"]}}
        )
        for layer in request.profile.layers
    ]
    cluster = request.placed_on
    slow = cluster.devices[0].model_copy(update={"type": "slow"})
    mixed = cluster.model_copy(update={"devices": (slow, cluster.devices[1])})
    profile = request.profile.model_copy(update={"layers": tuple(layers), "cluster": mixed})
    problem = Problem.from_request(request.model_copy(update={"profile": profile}))
    answer = StageModel(problem, reduced(problem), upper=10.0).solve(Limits(60))
    assert answer.devices == [1, 1, 0]
    assert costs.evaluate(problem, answer.devices).objective_value == 5.0
