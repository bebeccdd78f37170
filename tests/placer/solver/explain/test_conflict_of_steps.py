"""Objective ``step``: the smallest set of requirements that no answer meets together."""

import itertools

import pytest
from enumeration import Enumeration
from every_step import Steps, requests
from hypothesis import assume, given, reject
from hypothesis import strategies as st
from small_requests import examples

from placer.errors import InputError
from placer.schema import Constraints, PlacementRequest
from placer.solver.explain import conflict
from placer.solver.problem import Problem
from placer.solver.solve import solve
from placer.solver.step.choices import questions

SETTINGS = examples(45)


@st.composite
def hard_requests(draw):
    """Draw requests whose rules are hard to meet together."""
    asked = draw(requests(contiguous=draw(st.sampled_from([None, True]))))
    names = [layer.name for layer in asked.profile.layers]
    devices = [device.name for device in asked.devices]
    rules = {
        "contiguous": asked.constraints.contiguous,
        "pinned": draw(
            st.dictionaries(st.sampled_from(names), st.sampled_from(devices), max_size=3)
        ),
        "forbidden": draw(
            st.dictionaries(st.sampled_from(names), st.tuples(st.sampled_from(devices)), max_size=1)
        ),
        "colocated": draw(st.sampled_from([(), ((names[0], names[-1]),)])),
        "max_devices": draw(st.sampled_from([None, 1, 2])),
        "max_layers": draw(st.sampled_from([None, 1, 2])),
    }
    limit = draw(st.sampled_from([4, 7, 10, 14]))
    cluster = asked.cluster.model_dump()
    for device in cluster["devices"]:
        device["memory_bytes"] = limit
    try:
        return PlacementRequest.model_validate(
            asked.model_dump() | {"constraints": rules, "cluster": cluster}
        )
    except InputError:  # pins that contradict a rule by themselves
        reject()


def met_sets(request, asked):
    """Return the numbers of the requirements that each question, assignment and order meets."""
    steps, found = Steps(request), set()
    by_rule = any(requirement.kind == "contiguous" for requirement in asked)
    for way, own in steps.ways():
        for shape in [True, False] if by_rule else [own]:
            every = Enumeration(way, shape)
            for where in every.maps():
                for use in uses(every, where, own):
                    met = (every.meets(requirement, where, use) for requirement in asked)
                    found.add(frozenset(number for number, holds in enumerate(met) if holds))
    return found


def uses(every, where, own):
    """Return bytes by device for each order of stages.

    Of free stages that are not the way's own, all are in flight.
    """
    if every.contiguous != own:
        yield from every.uses(where)
        return
    steps = Steps(every.request)
    for _, stage_of, found in steps.plans(every, where):
        yield steps.uses(every, where, stage_of, found)


@SETTINGS
@given(request=hard_requests())
def test_nothing_meets_the_group_and_something_meets_every_smaller_one(request):
    placement = solve(request)
    assume(placement.status == "infeasible")
    asked = conflict.requirements([Problem.from_request(way) for way in questions(request)])
    words = [requirement.words for requirement in asked]
    group = {words.index(text) for text in placement.infeasible.requirements}
    met = met_sets(request, asked)
    assert not any(numbers >= set(range(len(asked))) for numbers in met)
    assert not group or not any(numbers >= group for numbers in met)
    if placement.infeasible.minimal:
        assert group
        for smaller in itertools.combinations(range(len(asked)), len(group) - 1):
            assert any(numbers >= set(smaller) for numbers in met)


def test_a_schedule_that_keeps_stages_together_and_pins_that_go_round_are_named(chain):
    rules = Constraints(pinned={"l0": "d0", "l1": "d1", "l2": "d0"})
    why = solve(
        chain([1] * 3, objective="step", chunks=2, schedule="1f1b", constraints=rules)
    ).infeasible
    assert why.minimal and len(why.requirements) == 4 and "contiguous" in why.requirements[-1]


def test_memory_that_no_choice_makes_do_names_the_device_and_the_choice_that_comes_nearest(chain):
    request = chain([1, 1], devices=1, param_bytes=600, objective="step", chunks=2, schedule="auto")
    why = solve(request).infeasible
    assert why.requirements == ("'d0' holds at most 1000 B",) and why.minimal
    assert why.missing_bytes == pytest.approx(200)
