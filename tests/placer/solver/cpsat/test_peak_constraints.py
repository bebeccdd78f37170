"""The peaks in the integer programs: with every layer pinned, exactly the cost model's."""

from dataclasses import replace
from itertools import permutations
from random import Random

import pytest

from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver import costs
from placer.solver.contiguous.stage_program import StageModel
from placer.solver.cpsat import memory_constraints
from placer.solver.cpsat.model import PlacementModel
from placer.solver.cpsat.runner import Limits
from placer.solver.problem import Problem
from placer.solver.reduce import reduced


def pinned(problem, random):
    """Return the problem with every layer pinned, and that assignment's costs, or None."""
    where = [random.randrange(len(problem.devices)) for _ in problem.layers]
    if problem.contiguous:
        where.sort()
    fixed = replace(problem, allowed=tuple(frozenset({device}) for device in where))
    return fixed, costs.evaluate(fixed, where)


def with_limit(problem, limit_bytes):
    devices = tuple(
        device.model_copy(update={"memory_bytes": limit_bytes}) for device in problem.devices
    )
    return replace(problem, devices=devices)


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("schedule", ["fill-drain", "zero-bubble"])
@pytest.mark.parametrize("seed", range(10))
def test_the_smallest_memory_over_nodes_and_devices_is_that_of_the_assignment(
    seed, schedule, training_problem
):
    random = Random(seed)
    for _ in range(25):
        problem, result = pinned(training_problem(random, schedule=schedule), random)
        answer = PlacementModel(problem, reduced(problem)).solve(Limits(60))
        assert answer.bound == pytest.approx(
            max(use.total_bytes for use in result.memory), rel=1e-12
        )


def in_inference(problem):
    return Problem.from_request(problem.request.model_copy(update={"training": False}))


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("seed", range(10))
def test_in_inference_it_is_that_of_the_assignment_too(seed, training_problem):
    random = Random(seed)
    for _ in range(25):
        problem, result = pinned(in_inference(training_problem(random)), random)
        answer = PlacementModel(problem, reduced(problem)).solve(Limits(60))
        assert answer.bound == pytest.approx(
            max(use.total_bytes for use in result.memory), rel=1e-12
        )


@pytest.mark.covering
@pytest.mark.parametrize("contiguous", [False, True], ids=["free", "contiguous"])
@pytest.mark.parametrize("seed", range(5))
def test_inference_fits_in_what_the_assignment_needs_and_not_in_a_byte_less(
    seed, contiguous, training_problem
):
    """Also where the bottleneck that is known leaves nodes few stages."""
    random = Random(seed)
    for _ in range(10):
        drawn = replace(
            in_inference(training_problem(random, objective="throughput")), contiguous=contiguous
        )
        problem, result = pinned(drawn, random)
        need = max(use.total_bytes for use in result.memory)
        for limit in range(max(0, need - 1), need + 1):
            limited = with_limit(problem, limit)
            model = PlacementModel(limited, reduced(limited), upper=result.objective_value)
            assert model.solve(Limits(60)).infeasible == (limit < need)


def rules_of_a_value_that_is_read_by(readers):
    """Return the number of constraints of four devices for one value, in inference."""
    names = [f"l{index}" for index in range(readers + 1)]
    layers = [Layer(name=name, forward_ms={"t": 1}) for name in names]
    edges = [Edge(source="l0", targets=names[1:], bytes=1)]
    devices = [Device(name=name, type="t", memory_bytes=1) for name in "abcd"]
    links = [Link(source=a, target=b, bandwidth_bytes_per_s=1) for a, b in permutations("abcd", 2)]
    profile = Profile(layers=layers, edges=edges, cluster=Cluster(devices=devices, links=links))
    rules = Constraints(contiguous=False)
    problem = Problem.from_request(
        PlacementRequest(profile=profile, objective="memory", constraints=rules)
    )
    model = PlacementModel(problem, reduced(problem))
    return len(model.cp.proto.constraints), memory_constraints.rules_a_device(problem)


def test_rules_of_a_value_grow_as_its_readers_and_not_as_their_square():
    few, counted_few = rules_of_a_value_that_is_read_by(40)
    many, counted_many = rules_of_a_value_that_is_read_by(80)
    assert 1.9 * few < many < 2.1 * few
    assert 1.9 * counted_few < counted_many < 2.1 * counted_few


def test_a_step_counts_at_which_nothing_but_a_gradient_of_tied_parameters_waits():
    # It waits while their first layer runs backwards, which needs less of its own than their last
    # one.
    layers = [
        Layer(
            name=name,
            forward_ms={"t": 1},
            backward_ms={"t": 1},
            backward_workspace_bytes=5 * (name == "c"),
        )
        for name in "abc"
    ]
    devices = [Device(name=name, type="t", memory_bytes=100) for name in "xy"]
    links = [{"source": a, "target": b, "bandwidth_bytes_per_s": 1e9} for a, b in ("xy", "yx")]
    tied = {"colocated": [("a", "c")], "tied": [{"layers": ("a", "c"), "gradient_bytes": 10}]}
    profile = Profile(
        layers=layers, training=True, cluster=Cluster(devices=devices, links=links), **tied
    )
    rules = Constraints(contiguous=False, pinned={"a": "x", "b": "y"})
    problem = Problem.from_request(
        PlacementRequest(profile=profile, objective="memory", constraints=rules)
    )
    assert costs.evaluate(problem, [0, 1, 0]).memory[0].total_bytes == 10
    assert PlacementModel(problem, reduced(problem)).solve(Limits(60)).bound == 10


def test_sizes_keep_their_bytes_though_their_multiples_have_a_common_divisor():
    # A byte that 3 micro-batches save and a workspace of 3 bytes: in units of 3 bytes the one saved
    # would be none.
    layers = [
        Layer(
            name=name,
            forward_ms={"t": 1},
            backward_ms={"t": 1},
            saved_bytes=saved,
            backward_workspace_bytes=3,
        )
        for name, saved in (("a", 1), ("b", 0))
    ]
    cluster = Cluster(devices=[Device(name="x", type="t", memory_bytes=10)])
    profile = Profile(layers=layers, training=True, cluster=cluster)
    asked = PlacementRequest(profile=profile, objective="memory", chunks=3, schedule="fill-drain")
    problem = Problem.from_request(asked)
    assert PlacementModel(problem, reduced(problem)).solve(Limits(60)).bound == 2 * 1 + 1 + 3


@pytest.mark.covering(every=4)
@pytest.mark.parametrize("seed", range(10))
def test_stages_fit_in_what_the_assignment_needs_and_not_in_a_byte_less(seed, training_problem):
    random = Random(seed)
    for _ in range(10):
        problem, result = pinned(training_problem(random, objective="throughput"), random)
        need = max(use.total_bytes for use in result.memory)
        for limit, infeasible in ((need, False), (need - 1, True)):
            # the latter leaves nodes few stages
            for upper in (1000.0, result.objective_value) if limit >= 0 else ():
                limited = with_limit(problem, limit)
                answer = StageModel(limited, reduced(limited), upper=upper).solve(Limits(60))
                assert answer.infeasible == infeasible
