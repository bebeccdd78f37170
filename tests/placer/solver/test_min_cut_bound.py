"""Bounds from what the device of one layer must do at the least."""

import pytest
from enumeration import brute_force
from hypothesis import assume, given
from small_requests import examples, small_requests

from placer.solver.bounds.min_cut_bound import cut_bound
from placer.solver.problem import Problem
from placer.solver.reduce import reduced

SETTINGS = examples(120)


@SETTINGS
@given(request=small_requests(objectives=("throughput",)))
def test_no_assignment_is_below_the_bound(request):
    problem = Problem.from_request(request)
    best = brute_force(request, problem.contiguous)
    assume(best is not None)
    assert cut_bound(problem, reduced(problem)) <= best * (1 + 1e-9)


def test_a_layer_whose_transfers_outweigh_its_neighbours_keeps_them(chain):
    # l1 alone takes 3 + 4 + 4; with both neighbours, which nothing else holds, 3 + 1 + 1
    problem = Problem.from_request(chain([1.0, 3.0, 1.0], devices=3, value_bytes=4))
    assert cut_bound(problem, reduced(problem)) == pytest.approx(5.0)


def test_cheap_transfers_leave_the_largest_layer_with_its_transfers(chain):
    # l1 alone takes 3 + 1 + 1, and a neighbour more adds its 2 for the 1 that it saves
    problem = Problem.from_request(chain([2.0, 3.0, 2.0], devices=3, value_bytes=1))
    assert cut_bound(problem, reduced(problem)) == pytest.approx(5.0)
