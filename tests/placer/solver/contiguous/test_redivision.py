"""Redivision of neighbouring stages."""

import random

import pytest
from enumeration import brute_force
from hypothesis import assume, given
from small_requests import examples, small_requests

from placer.schema import Constraints
from placer.solver import costs
from placer.solver.contiguous import redivision, stage_program
from placer.solver.problem import Problem
from placer.solver.reduce import reduced
from placer.solver.solve import Portfolio

SETTINGS = examples(60)


def search_from(problem, devices):
    """Return a search that knows one placement."""
    search = Portfolio(problem)
    search.request, search.nodes = problem.request, reduced(problem)
    search.offer(devices, "given")
    return search


@SETTINGS
@given(request=small_requests(objectives=("throughput",)))
def test_what_is_one_group_is_divided_at_best(request):
    problem = Problem.from_request(request)
    assume(stage_program.bounds(problem))
    nodes = reduced(problem)
    assume(all(nodes.allowed))
    numbers = random.Random(0)
    for _ in range(20):
        search = search_from(
            problem, nodes.spread([numbers.choice(sorted(allowed)) for allowed in nodes.allowed])
        )
        if search.best is not None:
            break
    assume(search.best is not None)
    start = search.value
    redivision.redivide(search, nodes, 10.0)
    result = costs.judged(problem, search.best)
    assert result.objective_value == search.value <= start
    if (
        stage_program.applies(problem)
        and problem.most_devices - 1 <= len(result.stages) <= redivision.MOST
    ):
        assert search.value == pytest.approx(
            brute_force(request, True), rel=2 * redivision.GAIN, abs=1e-6
        )


def test_stages_beyond_the_group_move_on_where_a_device_is_left(chain):
    request = chain([3.0, 3.0, 1.0, 1.0], devices=3, constraints=Constraints(contiguous=True))
    problem = Problem.from_request(request)
    search = search_from(problem, [0, 0, 1, 1])
    redivision.redivide(search, reduced(problem), 10.0)
    assert search.value == pytest.approx(brute_force(request, True))


def test_a_chain_of_many_stages_is_balanced_group_by_group(chain):
    problem = Problem.from_request(
        chain([1.0] * 24, devices=8, constraints=Constraints(contiguous=True))
    )
    search = search_from(problem, [min(layer, 7) for layer in range(24)])
    before = search.value
    redivision.redivide(search, reduced(problem), 10.0)
    assert search.value < before / 3


def test_where_the_busiest_stage_alone_counts_no_group_is_without_it(chain, monkeypatch):
    problem = Problem.from_request(
        chain([1.0, 1.0, 9.0, 1.0], devices=4, constraints=Constraints(contiguous=True))
    )
    quicker, tried = redivision._quicker, []

    def told(search, nodes, current, group, work):
        tried.append(group)
        return quicker(search, nodes, current, group, work)

    monkeypatch.setattr(redivision, "_quicker", told)
    for alone in (True, False):
        tried.clear()
        redivision.redivide(
            search_from(problem, [0, 1, 2, 3]), reduced(problem), 10.0, busiest_alone=alone
        )
        assert all(group.first <= 2 < group.end for group in tried) == alone and tried


def test_no_more_work_is_done_than_may_be(chain):
    problem = Problem.from_request(
        chain([1.0] * 24, devices=8, constraints=Constraints(contiguous=True))
    )
    search = search_from(problem, [min(layer, 7) for layer in range(24)])
    search.meter.limit = 0.0
    before = search.value
    redivision.redivide(search, reduced(problem), 10.0)
    assert search.value == before
