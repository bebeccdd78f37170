"""Integer prices, against all ways to share out nodes, and the bounds that they prove."""

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given
from small_graphs import least_bottleneck
from small_requests import examples, small_requests

from placer.schema import Constraints
from placer.solver.free import column_generation
from placer.solver.free.column_generation import whole_part, whole_prices
from placer.solver.free.set_graph import set_graph
from placer.solver.problem import Problem
from placer.solver.reduce import reduced

FREE = Constraints(contiguous=False)


ASSIGNMENTS = np.array([*itertools.product((0, 1, 2), repeat=7)])
"""Every way to share out seven nodes among three devices."""


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("seed", range(20))
def test_however_nodes_are_shared_out_some_device_holds_as_much(seed):
    random = Random(seed)
    prices = [random.uniform(-0.1, 0.8) for _ in range(7)]
    kept = random.choice([0, 0, 2])  # what a device holds that pays for no transfer
    shares = random.choice([[(2, 1.0)], [(1, 1.4), (1, 0.6)], [(1, 0.02), (1, 1.98)]])
    for whole, least in whole_prices(prices, shares, lambda whole: min(kept, int(whole.sum()))):
        assert (whole >= 0).all()
        one, other, free = ((device == ASSIGNMENTS) @ whole for device in range(3))
        assert ((one >= least[0]) | (other >= least[-1]) | (free > kept)).all()


def test_a_sum_is_one_more_than_a_multiple_of_the_devices():
    """Of 3 nodes of 0.4 for each of 3 devices, and one more, there are ten: some device holds 4."""
    rounded = [
        (int(whole.sum()), least)
        for whole, (least,) in whole_prices([0.4] * 10, [(3, 1.0)], lambda whole: 0)
    ]
    assert (10, 4) in rounded
    for total, least in rounded[1::2]:
        assert total == 3 * (least - 1) + 1


def test_what_a_device_holds_is_not_rounded_down_where_it_may_be_whole():
    assert whole_part(3 - 1e-9) == 3
    assert whole_part(2.9) == 2


@examples(60)
@given(asked=small_requests(objectives=("throughput",)))
def test_no_placement_is_better_than_what_they_prove(asked):
    rules = asked.constraints.model_copy(update={"contiguous": False})
    problem = Problem.from_request(
        asked.model_copy(update={"constraints": rules, "transfers": "added"})
    )
    best = least_bottleneck(problem) or 0.0
    assume(best > 0)
    for upper in (best, 1.5 * best):
        assert by_whole_prices(problem, upper) <= best * (1 + 1e-9)


def by_whole_prices(problem, upper):
    """Return the bound of prices that are rounded from work alone."""
    graph = set_graph(problem, reduced(problem, upper))
    if graph is None:
        return 0.0
    search = column_generation._Shares(graph, upper, 0.0, lambda work: False)
    works = zip(*(kind.work_ms for kind in graph.kinds), strict=True)
    search._try_whole([min(times) / upper for times in works])
    return search.known


def test_they_prove_at_once_what_one_more_layer_than_devices_can_share_costs(chain):
    problem = Problem.from_request(chain([3.0] * 7, devices=3, value_bytes=1, constraints=FREE))
    assert by_whole_prices(problem, 15.0) == pytest.approx(3 * 3 + 1, rel=1e-6)


def test_a_pool_of_light_sets_tells_which_prove_nothing(chain):
    # Sets of three neighbours weigh less than what is known: no rounded prices by which one is a
    # share are tried.
    problem = Problem.from_request(chain([3.0] * 7, devices=3, value_bytes=1, constraints=FREE))
    work = []
    search = column_generation._Shares(
        set_graph(problem, reduced(problem)), 15.0, 12.0, lambda done: work.append(done) or False
    )
    search.pool = {(0, frozenset(range(first, first + 3))): 11.0 for first in range(5)}
    search._try_whole([0.3] * 7)
    before, search.pool = sum(work), {}
    search._try_whole([0.3] * 7)
    assert sum(work) > 2 * before
