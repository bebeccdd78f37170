"""The capacity of devices, against the cost model, and searches where more than state counts."""

from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from small_requests import examples, small_requests

from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver import costs
from placer.solver.free import pair_search
from placer.solver.free.device_capacity import DeviceCapacity
from placer.solver.problem import Problem
from placer.solver.reduce import reduced

SETTINGS = examples(60)


def free_problem(asked):
    rules = asked.constraints.model_copy(
        update={"contiguous": False, "max_devices": None, "max_layers": None}
    )
    return Problem.from_request(
        asked.model_copy(update={"constraints": rules, "transfers": "added"})
    )


@SETTINGS
@given(data=st.data())
def test_what_fits_is_what_the_cost_model_says_fits_without_recomputing(data):
    problem = free_problem(data.draw(small_requests(objectives=("throughput",))))
    nodes, random = reduced(problem), Random(data.draw(st.integers(0, 99)))
    assume(all(nodes.allowed))
    room = DeviceCapacity(problem, nodes)
    rule = "always" if problem.request.constraints.recompute == "always" else "never"
    rules = problem.request.constraints.model_copy(update={"recompute": rule})
    never = Problem.from_request(problem.request.model_copy(update={"constraints": rules}))
    for _ in range(3):
        devices = [random.choice(sorted(allowed)) for allowed in nodes.allowed]
        result = costs.evaluate(never, nodes.spread(devices))
        assume(result is not None)
        assert room.holds(devices) == costs.fits(never, result)


@SETTINGS
@given(data=st.data())
def test_searches_from_a_placement_that_fits_find_one_that_fits_and_is_no_worse(data):
    problem = free_problem(data.draw(small_requests(objectives=("throughput",))))
    nodes, random = reduced(problem), Random(data.draw(st.integers(0, 99)))
    assume(all(nodes.allowed) and pair_search.applies(problem, nodes))
    start = nodes.spread([random.choice(sorted(allowed)) for allowed in nodes.allowed])
    known = costs.judged(problem, start)
    assume(known is not None)
    looks = []
    devices = pair_search.PairSearch(problem, nodes).improved(
        start, lambda work: len(looks) > 60 or bool(looks.append(1))
    )
    result = costs.judged(problem, devices) if devices is not None else known
    assert result is not None and result.objective_value <= known.objective_value * (1 + 1e-9)


@pytest.mark.parametrize(("training", "room_bytes"), [(False, 125), (True, 450)])
def test_a_fast_device_gets_as_many_layers_as_it_has_room_for_beside_their_activations(
    training, room_bytes
):
    # That is four of six: 10 bytes and, in training, 20 for each of four micro-batches; a workspace
    # of 80 for all.
    layers = [
        Layer(
            name=f"l{index}",
            forward_ms={"fast": 1.0, "slow": 10.0},
            backward_ms={"fast": 1.0, "slow": 10.0} if training else {},
            param_bytes=10,
            saved_bytes=20 if training else 0,
            forward_workspace_bytes=80,
        )
        for index in range(6)
    ]
    names = ["d0", "d1", "d2"]
    cluster = Cluster(
        devices=[
            Device(name="d0", type="fast", memory_bytes=room_bytes),
            *(Device(name=name, type="slow", memory_bytes=300) for name in names[1:]),
        ],
        links=[
            Link(source=a, target=b, bandwidth_bytes_per_s=1e6)
            for a in names
            for b in names
            if a != b
        ],
    )
    edges = [Edge(source=f"l{index}", targets=(f"l{index + 1}",), bytes=1) for index in range(5)]
    profile = Profile(layers=layers, edges=edges, cluster=cluster, training=training)
    asked = PlacementRequest(
        profile=profile, constraints=Constraints(contiguous=False), chunks=4, schedule="fill-drain"
    )
    problem = Problem.from_request(asked)
    nodes, start = reduced(problem), [1, 1, 2, 2, 0, 0]
    assert costs.judged(problem, start) is not None
    devices = pair_search.PairSearch(problem, nodes).improved(start, lambda work: False)
    result = costs.judged(problem, devices)
    assert result is not None and devices.count(0) == 4
    assert result.objective_value == pytest.approx(20 if training else 10, rel=1e-3)
