"""Passes kept up to date, against the cost model."""

from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from small_requests import examples, small_requests

from placer.solver import costs, pass_times
from placer.solver.bounds import simple_bounds
from placer.solver.free.device_capacity import DeviceCapacity
from placer.solver.latency.latency_moves import _State
from placer.solver.problem import Problem
from placer.solver.reduce import reduced

SETTINGS = examples(300)


@SETTINGS
@given(data=st.data())
def test_the_latency_kept_move_by_move_is_that_of_the_cost_model_as_are_its_requirements(data):
    problem = Problem.from_request(data.draw(small_requests(objectives=("latency",))))
    nodes = reduced(problem)
    assume(all(nodes.allowed))
    random = Random(data.draw(st.integers(0, 99)))
    devices = [random.choice(sorted(allowed)) for allowed in nodes.allowed]
    assume(
        costs.evaluate(problem, nodes.spread(devices))
        and costs.allowed(problem, nodes.spread(devices))
    )
    state = _State(problem, nodes, DeviceCapacity(problem, nodes), devices)
    for _ in range(20):
        state.move(state.pick(random), 1.2 * state.length_ms)
        layers = nodes.spread(state.device)
        result = costs.evaluate(problem, layers)
        assert costs.allowed(problem, layers)
        assert result is not None
        assert state.length_ms == pytest.approx(pass_times.latency_ms(problem, layers), abs=1e-9)
        assert simple_bounds.lower_bound(problem, nodes) <= state.length_ms * (1 + 1e-9)


@SETTINGS
@given(data=st.data())
def test_what_fits_move_by_move_fits_by_the_cost_model(data):
    problem = Problem.from_request(data.draw(small_requests(objectives=("latency",))))
    nodes = reduced(problem)
    assume(all(nodes.allowed))
    random = Random(data.draw(st.integers(0, 99)))
    devices = [random.choice(sorted(allowed)) for allowed in nodes.allowed]
    assume(costs.judged(problem, nodes.spread(devices)))
    state = _State(problem, nodes, DeviceCapacity(problem, nodes), devices)
    for _ in range(20):
        if state.move(state.pick(random), 1.2 * state.length_ms) and state.fits():
            assert costs.judged(problem, nodes.spread(state.device))
