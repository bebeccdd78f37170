"""Objective latency in the portfolio."""

from placer.schema import Constraints
from placer.solver.cpsat import runner
from placer.solver.latency import latency_search
from placer.solver.solve import Portfolio, solve

FREE = Constraints(contiguous=False)


def test_parallel_rows_are_proven_to_be_as_short_as_can_be_without_a_program(rows):
    # Eight rows of 50 layers on eight devices: by the device's time cuts of one order see none of
    # it.
    problem = rows([[1.0] * 50] * 8, devices=8, constraints=FREE)
    placement = solve(problem.request)
    assert (placement.status, placement.objective_value) == ("optimal", 50.0)
    assert placement.method == "list schedule"


def test_what_all_devices_share_is_no_less_than_the_work_there_is(rows):
    problem = rows([[1.0]] * 7, devices=3, constraints=FREE)
    search = Portfolio(problem)
    search._start()
    assert search.value == 3.0 and search.bound > 7 / 3 * (1 - 1e-9)


def test_local_search_goes_on_until_its_work_is_done_where_no_program_is_worth_building(
    rows, monkeypatch
):
    monkeypatch.setattr(latency_search, "worth_building", lambda *asked: False)
    # 126 or more, but no proof of that
    problem = rows([[1.0]] * 251, devices=2, constraints=FREE, work_limit=2.0)
    search = Portfolio(problem, meter=runner.Meter(2.0))
    search._start()
    assert search.open()
    latency_search.before_the_program(search)
    assert search.open() and search.meter.left < 0


def test_the_same_work_gives_the_same_answer(rows):
    rules = {"constraints": FREE, "work_limit": 0.5, "time_limit_s": 3600.0}
    problem = rows(
        [[float((7 * i) % 5 + 1) for i in range(40)], [3.0] * 50, [2.0] * 61], devices=4, **rules
    )
    one, other = solve(problem.request), solve(problem.request)
    assert one.model_copy(update={"solve_time_s": 0.0}) == other.model_copy(
        update={"solve_time_s": 0.0}
    )
