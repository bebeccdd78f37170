"""The smallest conflicting set of requirements, against what each assignment meets."""

import itertools

import pytest
from enumeration import Enumeration
from hypothesis import assume, given
from small_requests import examples, small_requests

from placer.schema import Constraints
from placer.solver.explain import conflict
from placer.solver.problem import Problem
from placer.solver.solve import solve

SETTINGS = examples(70)


def met_sets(request, requirements, contiguous):
    """Return the numbers of the requirements that each assignment meets, in each shape."""
    found = set()
    for shape in [True, False] if contiguous else [False]:
        every = Enumeration(request, shape)
        for where in every.maps():
            for use in every.uses(where):
                met = (every.meets(asked, where, use) for asked in requirements)
                found.add(frozenset(number for number, holds in enumerate(met) if holds))
    return found


@SETTINGS
@given(request=small_requests(objectives=("throughput",)))
def test_nothing_meets_the_group_and_something_meets_every_smaller_one(request):
    placement = solve(request)
    assume(placement.status == "infeasible")
    asked = conflict.requirements([Problem.from_request(request)])
    words = [requirement.words for requirement in asked]
    group = [words.index(text) for text in placement.infeasible.requirements]
    assert group and placement.infeasible.minimal
    met = met_sets(request, asked, placement.contiguous)
    assert not any(numbers >= set(group) for numbers in met)
    for smaller in itertools.combinations(range(len(asked)), len(group) - 1):
        assert any(numbers >= set(smaller) for numbers in met)


def test_what_has_nothing_to_do_with_it_is_not_named(chain):
    rules = Constraints(
        pinned={"l0": "d0", "l1": "d0", "l3": "d1"},
        forbidden={"l2": ("d0",)},
        colocated=(("l1", "l2"),),
        max_devices=2,
    )
    why = solve(chain([1] * 4, constraints=rules)).infeasible
    assert why.requirements == (
        "layer 'l1' is pinned to 'd0'",
        "layer 'l2' is forbidden on 'd0'",
        "layers 'l1', 'l2' are colocated",
    )


def test_memory_of_each_device_is_named_where_no_device_holds_a_layer(chain):
    why = solve(chain([1, 1], param_bytes=[2048, 10], memory_bytes=1024)).infeasible
    assert why.requirements == ("'d0' holds at most 1.0 KiB", "'d1' holds at most 1.0 KiB")
    assert "1.0 KiB short" in why.reason


@pytest.mark.parametrize("memory_bytes", [1_000, 10_000])
def test_contiguity_is_named_only_where_it_stands_in_the_way(chain, memory_bytes):
    rules = Constraints(pinned={"l0": "d0", "l1": "d1", "l2": "d0"}, contiguous=True)
    why = solve(chain([1] * 3, constraints=rules, memory_bytes=memory_bytes)).infeasible
    assert len(why.requirements) == 4 and "contiguous" in why.requirements[-1]
