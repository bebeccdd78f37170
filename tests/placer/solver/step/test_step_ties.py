"""Ties of equal steps: less transfer, then better balance, against every assignment."""

import pytest
from every_step import Steps, requests
from hypothesis import assume, given
from rows import row
from small_requests import examples

from placer.schema import Constraints
from placer.solver.check import check
from placer.solver.solve import solve

SETTINGS = examples(45)


def ranks_as_good(request, placement):
    """Return transfer and spread of every map with the placement's choices and an equal step."""
    steps = Steps(request)
    for every, where in steps.maps():
        taken = every.request.profile.batch_size, every.request.schedule, every.contiguous
        if taken != (placement.batch_size, placement.schedule, placement.contiguous):
            continue
        if every.obeys_rules(where) and every.can_pass(where):
            shortest = min(steps.steps(every, where), default=None)
            if shortest is not None and shortest <= placement.objective_value * (1 + 1e-11):
                yield every.rank(where)


@SETTINGS
@given(request=requests(row=True, contiguous=True))
def test_of_a_row_no_cut_with_as_short_a_step_has_a_smaller_rank(request):
    request = request.model_copy(update={"break_ties": True})
    placement = solve(request)
    assume(placement.layer_devices)
    transfer, spread = min(ranks_as_good(request, placement))
    assert placement.tie_breaks.proven
    assert placement.tie_breaks.transfer_ms == pytest.approx(transfer, abs=1e-9)
    assert placement.tie_breaks.imbalance_ms == pytest.approx(spread, abs=1e-9)


@SETTINGS
@given(request=requests())
def test_a_rank_that_is_said_to_be_proven_is_the_smallest(request):
    request = request.model_copy(update={"break_ties": True})
    placement = solve(request)
    check(request, placement)
    assume(placement.layer_devices)
    found = placement.tie_breaks.transfer_ms, placement.tie_breaks.imbalance_ms
    least = min(ranks_as_good(request, placement))
    if placement.tie_breaks.proven:
        assert found == pytest.approx(least, abs=1e-9)
    assert least[0] <= found[0] + 1e-9


def test_ties_leave_the_step_as_short_as_it_is(chain):
    request = chain([9, 3, 3, 2, 5], devices=3, objective="step", chunks=4)
    broken = solve(request.model_copy(update={"break_ties": True}))
    assert (
        broken.objective_value == pytest.approx(solve(request).objective_value)
        and broken.status == "optimal"
    )


def test_ties_are_broken_of_the_best_step_not_of_each_small_bottleneck_on_the_way(monkeypatch):
    # 5,000 layers took 66 s for a time limit of 10 s: each search for a bottleneck broke its ties.
    monkeypatch.setattr(
        "placer.solver.cpsat.ties.broken", lambda *_: pytest.fail("a bottleneck's ties")
    )
    asked = {
        "saved_bytes": 10,
        "memory_bytes": 128,
        "chunks": 4,
        "schedule": "interleaved",
        "work_limit": 10,
    }
    # so that no cut of a row will do
    rules = Constraints(colocated=(("l0", "l13"),))
    placement = solve(row([1.0] * 14, constraints=rules, break_ties=True, **asked))
    assert placement.tie_breaks is not None
