"""The worst moment in the integer programs: with every layer pinned, exactly what the cost model says."""

from dataclasses import replace
from random import Random

import pytest

from placer.schema import Cluster, Constraints, Device, Layer, PlacementRequest, Profile
from placer.solver import costs
from placer.solver.contiguous.stages import StageModel
from placer.solver.problem import Problem
from placer.solver.program.cpsat import Limits
from placer.solver.program.model import PlacementModel
from placer.solver.reduce import reduced


def pinned(problem, random):
    """The problem with every layer pinned to some device, and that assignment's costs, or None."""
    where = [random.randrange(len(problem.devices)) for _ in problem.layers]
    if problem.contiguous:
        where.sort()
    fixed = replace(problem, allowed=tuple(frozenset({device}) for device in where))
    return fixed, costs.evaluate(fixed, where)


def with_limit(problem, limit_bytes):
    devices = tuple(device.model_copy(update={"memory_bytes": limit_bytes}) for device in problem.devices)
    return replace(problem, devices=devices)


@pytest.mark.parametrize("schedule", ["fill-drain", "zero-bubble"])
@pytest.mark.parametrize("seed", range(10))
def test_the_smallest_memory_over_nodes_and_devices_is_that_of_the_assignment(seed, schedule, training_problem):
    random = Random(seed)
    for _ in range(25):
        problem, result = pinned(training_problem(random, schedule=schedule), random)
        answer = PlacementModel(problem, reduced(problem)).solve(Limits(60))
        assert answer.bound == pytest.approx(max(use.total_bytes for use in result.memory), rel=1e-12)


def test_a_step_counts_at_which_nothing_but_a_gradient_of_tied_parameters_waits():
    """It waits while their first layer runs backwards, which needs less of its own than their last one."""
    layers = [
        Layer(name=name, forward_ms={"t": 1}, backward_ms={"t": 1}, backward_workspace_bytes=5 * (name == "c"))
        for name in "abc"
    ]
    devices = [Device(name=name, type="t", memory_bytes=100) for name in "xy"]
    links = [{"source": a, "target": b, "bandwidth_bytes_per_s": 1e9} for a, b in ("xy", "yx")]
    tied = {"colocated": [("a", "c")], "tied": [{"layers": ("a", "c"), "gradient_bytes": 10}]}
    profile = Profile(layers=layers, training=True, cluster=Cluster(devices=devices, links=links), **tied)
    rules = Constraints(contiguous=False, pinned={"a": "x", "b": "y"})
    problem = Problem.from_request(PlacementRequest(profile=profile, objective="memory", constraints=rules))
    assert costs.evaluate(problem, [0, 1, 0]).memory[0].total_bytes == 10
    assert PlacementModel(problem, reduced(problem)).solve(Limits(60)).bound == 10


def test_sizes_keep_their_bytes_though_their_multiples_have_a_common_divisor():
    """A byte that 3 micro-batches save and a workspace of 3 bytes: in units of 3 bytes the one saved would be none."""
    layers = [
        Layer(name=name, forward_ms={"t": 1}, backward_ms={"t": 1}, saved_bytes=saved, backward_workspace_bytes=3)
        for name, saved in (("a", 1), ("b", 0))
    ]
    cluster = Cluster(devices=[Device(name="x", type="t", memory_bytes=10)])
    profile = Profile(layers=layers, training=True, cluster=cluster)
    asked = PlacementRequest(profile=profile, objective="memory", chunks=3, schedule="fill-drain")
    problem = Problem.from_request(asked)
    assert PlacementModel(problem, reduced(problem)).solve(Limits(60)).bound == 2 * 1 + 1 + 3


@pytest.mark.parametrize("seed", range(10))
def test_stages_fit_in_what_the_assignment_needs_and_not_in_a_byte_less(seed, training_problem):
    random = Random(seed)
    for _ in range(10):
        problem, result = pinned(training_problem(random, objective="throughput"), random)
        need = max(use.total_bytes for use in result.memory)
        for limit, infeasible in ((need, False), (need - 1, True)):
            if limit >= 0:
                limited = with_limit(problem, limit)
                answer = StageModel(limited, reduced(limited), upper=1000.0).solve(Limits(60))
                assert answer.infeasible == infeasible
