"""Local search over free placements."""

from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from small_requests import examples, small_requests

from placer.schema import Constraints
from placer.solver import costs
from placer.solver.free import local_search
from placer.solver.free.device_capacity import DeviceCapacity
from placer.solver.free.loads import Loads, loads_add_up
from placer.solver.problem import Problem
from placer.solver.reduce import reduced

SETTINGS = examples(200)


@SETTINGS
@given(data=st.data())
def test_loads_kept_move_by_move_are_those_of_the_cost_model(data):
    request = data.draw(small_requests(objectives=("throughput",)))
    free = request.model_copy(
        update={"constraints": Constraints(contiguous=False), "transfers": "added"}
    )
    problem = Problem.from_request(free)
    assume(problem.one_link is not None)
    nodes = reduced(problem)
    random = Random(data.draw(st.integers(0, 99)))
    devices = [random.choice(sorted(allowed)) for allowed in nodes.allowed]
    state = local_search._State(
        problem, nodes, Loads(problem, nodes), DeviceCapacity(problem, nodes), list(devices)
    )
    for _ in range(5):
        node, device = state.pick(random)
        if device is not None:
            state.move(node, device)
    result = costs.evaluate(problem, nodes.spread(state.device))
    assert state.load == pytest.approx(result.load_ms, abs=1e-9)


def test_everything_on_one_device_is_shared_out(chain):
    problem = Problem.from_request(
        chain([1.0] * 8, devices=4, constraints=Constraints(contiguous=False))
    )
    devices = local_search.improved(problem, reduced(problem), [0] * 8, over=lambda: False)
    assert costs.evaluate(problem, devices).objective_value == 2.0


def test_layers_go_together_where_one_alone_would_make_it_worse(chain):
    # Two pairs that exchange much: each alone pays for the transfer, both together halve the
    # bottleneck.
    request = chain([1.0] * 4, devices=2, value_bytes=0, constraints=Constraints(contiguous=False))
    edges = [
        edge.model_copy(update={"bytes": 9})
        for edge in (request.profile.edges[0], request.profile.edges[2])
    ]
    profile = request.profile.model_copy(update={"edges": tuple(edges)})
    problem = Problem.from_request(request.model_copy(update={"profile": profile}))
    devices = local_search.improved(problem, reduced(problem), [0] * 4, over=lambda: False)
    assert costs.evaluate(problem, devices).objective_value == 2.0


def test_no_device_gets_more_than_it_can_hold(chain):
    """The one device that is fast enough for all has room for two of the six layers."""
    request = chain(
        [1.0] * 6,
        devices=3,
        param_bytes=10,
        memory_bytes=25,
        constraints=Constraints(contiguous=False),
    )
    problem = Problem.from_request(request)
    assert loads_add_up(problem)
    devices = local_search.improved(
        problem, reduced(problem), [0, 0, 1, 1, 2, 2], over=lambda: False
    )
    assert costs.fits(problem, costs.evaluate(problem, devices))


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
    assert loads_add_up(problem)
    devices = local_search.improved(problem, reduced(problem), start, over=lambda: False)
    assert costs.judged(problem, devices).objective_value == best_ms


def test_a_search_that_is_over_returns_its_start(chain):
    problem = Problem.from_request(
        chain([1.0] * 8, devices=4, constraints=Constraints(contiguous=False))
    )
    assert local_search.improved(problem, reduced(problem), [0] * 8, over=lambda: True) == [0] * 8
