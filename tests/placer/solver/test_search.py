"""Reports of the best placement so far, during the search."""

import pytest
from every_step import requests
from hypothesis import given
from hypothesis import strategies as st
from small_requests import examples, small_requests

from placer.solver.check import check
from placer.solver.solve import solve

SETTINGS = examples(60)


@SETTINGS
@given(
    request=st.one_of(
        requests(),
        small_requests(),
        small_requests(objectives=("throughput",)).map(
            lambda asked: asked.model_copy(update={"objective": "devices", "bottleneck_ms": 20.0})
        ),
    ),
    break_ties=st.booleans(),
)
def test_every_placement_that_is_told_meets_the_question_with_the_bound_that_was_proven_then(
    request, break_ties
):
    request = request.model_copy(update={"break_ties": break_ties})
    told = []
    last = solve(request, progress=told.append)
    for incumbent in told:  # all made at the end, when the search has gone on
        placement = incumbent.placement()
        check(request, placement)
        assert placement.objective_value == pytest.approx(incumbent.objective_value)
        assert placement.bound == pytest.approx(incumbent.bound, abs=1e-9)
        assert placement.bound <= last.objective_value * (1 + 1e-9)
    assert bool(told) == bool(last.layer_devices)
