"""Tables of the memory of intervals, against the cost model applied to each interval by itself."""

from itertools import pairwise

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from placer.solver import memory
from placer.solver.interval_moments import TrainingMoments
from placer.solver.problem import Problem

SETTINGS = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@SETTINGS
@given(data=st.data())
def test_each_interval_is_worth_what_a_device_with_its_layers_holds(data, strategies):
    problem = Problem.from_request(data.draw(strategies.requests()))
    assume(problem.training)
    count = len(problem.layers)
    ends = sorted({0, count, *data.draw(st.sets(st.integers(1, count - 1)))})
    blocks = [list(range(first, end)) for first, end in pairwise(ends)]
    tables = TrainingMoments(problem, blocks)
    assert tables.follows
    for first in range(len(blocks)):
        for end in range(first + 1, len(blocks) + 1):
            layers = [layer for block in blocks[first:end] for layer in block]
            found = memory.footprint(problem, memory.Held(layers, list(problem.values)))
            passing = found.one.activation_bytes + found.one.workspace_bytes
            assert (tables.kept[first, end], tables.moment[first, end]) == (found.kept_bytes, passing)


def test_an_order_that_is_not_the_profiles_is_not_called_exact(chain):
    request = chain([1, 1, 1])
    problem = Problem.from_request(request)
    assert not TrainingMoments(problem, [[0, 2], [1]]).follows
