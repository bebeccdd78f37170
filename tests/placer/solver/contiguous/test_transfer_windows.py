"""Windows of stages that know of transfers."""

from dataclasses import replace

import pytest

from placer.solver import costs
from placer.solver.contiguous import stage_program
from placer.solver.contiguous.stage_program import StageModel
from placer.solver.contiguous.transfer_windows import narrowed_windows
from placer.solver.cpsat.runner import Limits
from placer.solver.cpsat.stage_windows import stage_windows
from placer.solver.problem import Problem
from placer.solver.reduce import reduced


def test_they_leave_the_optimum_where_it_is(enumerated):
    narrower = 0
    for problem, nodes, best in enumerated:
        if not stage_program.applies(problem):
            continue
        wide, windows = stage_windows(problem, nodes, best), narrowed_windows(problem, nodes, best)
        narrower += windows != wide
        model = StageModel(problem, nodes, best * (1 + 1e-9), any_will_do=True)
        assert model.windows == windows
        devices = model.solve(Limits(60)).devices
        assert costs.evaluate(problem, devices).objective_value == pytest.approx(best)
    assert narrower > 5


def test_a_layer_is_at_no_stage_before_those_that_hold_what_it_depends_on(chain):
    # two layers fill a device, so three take two
    problem = Problem.from_request(chain([1.0] * 4, devices=2, memory_bytes=6, param_bytes=3))
    assert stage_windows(problem, reduced(problem), 100.0) == [(0, 0), (0, 0), (1, 1), (1, 1)]
    larger = Problem.from_request(chain([1.0] * 4, devices=2, memory_bytes=12, param_bytes=3))
    assert stage_windows(larger, reduced(larger), 100.0) == [(0, 1)] * 4


def test_a_value_that_must_not_be_cut_brings_its_ends_to_one_stage(chain):
    # l0 without l1 takes 1 + 6, both and l2 1 + 1 + 3 + 6, so l2 and l3 are behind them
    problem = Problem.from_request(chain([1.0, 1.0, 3.0, 1.0], devices=2, value_bytes=1))
    one, two, three = problem.values
    problem = replace(problem, values=(replace(one, bytes=6), two, replace(three, bytes=6)))
    nodes = reduced(problem)
    assert stage_windows(problem, nodes, 5.0) == [(0, 0), (0, 1), (0, 1), (1, 1)]
    assert narrowed_windows(problem, nodes, 5.0) == [(0, 0), (0, 0), (1, 1), (1, 1)]


def test_a_device_that_pays_for_no_transfer_may_be_any_stage(chain):
    # l1 fits nowhere but on d1, whose stage may be the second of two
    problem = Problem.from_request(chain([1.0, 4.0], devices=2, value_bytes=1))
    problem = replace(problem, untaxed=frozenset({1}))
    nodes = reduced(problem)
    assert narrowed_windows(problem, nodes, 4.5) == [(0, 0), (1, 1)]
    assert any(first > last for first, last in narrowed_windows(problem, nodes, 3.9))
