"""A limit of work: the same answer whatever the machine, and an end of the search."""

from random import Random

import pytest

from placer.schema import Constraints
from placer.solver.cpsat.model import PlacementModel
from placer.solver.cpsat.runner import Limits, Meter
from placer.solver.problem import Problem
from placer.solver.reduce import reduced
from placer.solver.solve import solve


@pytest.fixture
def hard(chain):
    """``hard(work)``: a free placement whose bound takes long to prove, with hours of time."""

    def ask(work, **asked):
        random = Random(1)
        times = [random.uniform(1, 10) for _ in range(40)]
        rules = Constraints(contiguous=False)
        return chain(
            times,
            devices=6,
            value_bytes=2,
            constraints=rules,
            time_limit_s=3600,
            work_limit=work,
            seed=3,
            **asked,
        )

    return ask


def test_the_search_ends_when_its_work_is_done(hard):
    placement = solve(hard(0.5))
    assert placement.status == "feasible" and 0 < placement.gap < 0.5


def test_the_same_work_gives_the_same_answer(hard):
    one, other = solve(hard(0.2)), solve(hard(0.2))
    assert one.model_copy(update={"solve_time_s": 0.0}) == other.model_copy(
        update={"solve_time_s": 0.0}
    )


def test_more_work_is_never_worse(hard):
    little, much = solve(hard(0.1)), solve(hard(1.0))
    assert much.objective_value <= little.objective_value and much.bound >= little.bound


def test_searches_share_what_they_may_do(chain):
    problem = Problem.from_request(chain([3.0, 1.0, 2.0, 5.0] * 5, devices=3, value_bytes=1))
    meter = Meter(limit=1e-4)
    first = PlacementModel(problem, reduced(problem)).solve(Limits(60, meter=meter))
    assert meter.done > 0 and not first.complete
    meter.done = meter.limit
    assert PlacementModel(problem, reduced(problem)).solve(Limits(60, meter=meter)).devices is None


def test_a_whole_batch_is_searched_for_within_the_same_work(chain):
    # Six unlike devices and a graph that is no row, so that nothing is proven and the work is used
    # up.

    def ask(work):
        request = chain([5.0, 3.0, 4.0, 1.0, 6.0, 2.0, 3.5] * 3, devices=4, value_bytes=2, chunks=6)
        edges = [
            edge.model_copy(update={"targets": (f"l{index + 2}",)})
            for index, edge in enumerate(request.profile.edges[:-1])
        ]
        profile = request.profile.model_copy(update={"edges": tuple(edges)})
        asked = {
            "objective": "step",
            "schedule": "auto",
            "work_limit": work,
            "time_limit_s": 3600.0,
        }
        return request.model_copy(update={"profile": profile, **asked})

    one, other, much = solve(ask(0.4)), solve(ask(0.4)), solve(ask(4.0))
    assert one.model_copy(update={"solve_time_s": 0.0}) == other.model_copy(
        update={"solve_time_s": 0.0}
    )
    assert much.objective_value <= one.objective_value
