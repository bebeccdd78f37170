"""Divisions of two devices' nodes, against every assignment."""

import itertools
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from small_requests import examples, small_requests

from placer.schema import Constraints
from placer.solver import costs
from placer.solver.bounds import memory_bounds
from placer.solver.free import pair_sweep
from placer.solver.free.loads import loads_add_up
from placer.solver.free.pair_sweep import Pairs, TooWide
from placer.solver.problem import Problem
from placer.solver.reduce import reduced

SETTINGS = examples(150)


def free_problem(data):
    """Draw a free placement's problem in which loads add up, also with published rules."""
    asked = data.draw(small_requests(objectives=("throughput",)))
    rules = asked.constraints.model_copy(update={"contiguous": False})
    problem = Problem.from_request(
        asked.model_copy(update={"constraints": rules, "transfers": "added"})
    )
    multicast, untaxed = data.draw(st.sampled_from([(False, ()), (True, ()), (True, (0,))]))
    problem = replace(problem, multicast=multicast, untaxed=frozenset(untaxed))
    assume(loads_add_up(problem) and len(problem.devices) > 1)
    return problem


def placed_freely(data):
    """Return a free placement's problem, its nodes, and a device that each may be on."""
    problem = free_problem(data)
    nodes = reduced(problem)
    assume(all(nodes.allowed))
    random = Random(data.draw(st.integers(0, 99)))
    return problem, nodes, [random.choice(sorted(allowed)) for allowed in nodes.allowed]


@SETTINGS
@given(data=st.data())
def test_loads_are_those_of_the_cost_model(data):
    problem, nodes, devices = placed_freely(data)
    result = costs.evaluate(problem, nodes.spread(devices))
    assert Pairs(problem, nodes).loads.by_device(devices) == pytest.approx(result.load_ms, abs=1e-9)


@SETTINGS
@given(data=st.data())
def test_of_all_ways_to_divide_what_two_hold_none_is_better_than_the_best_that_is_found(data):
    problem, nodes, devices = placed_freely(data)
    # numbers of devices and layers do not enter the comparison of labels
    numbers = {"least_devices": 1, "most_devices": len(problem.devices), "most_layers": None}
    problem = replace(problem, **numbers)
    assume(not memory_bounds.can_bind(problem) or memory_bounds.holds_state_alone(problem))
    held = [node for node, device in enumerate(devices) if device < 2]
    assume(held)
    room = [device.usable_bytes for device in problem.devices]
    every = []
    for choice in itertools.product((0, 1), repeat=len(held)):
        tried = list(devices)
        for node, device in zip(held, choice, strict=True):
            tried[node] = device
        result = costs.evaluate(problem, nodes.spread(tried))
        able = all(device in allowed for device, allowed in zip(tried, nodes.allowed, strict=True))
        if able and all(result.memory[device].total_bytes <= room[device] for device in (0, 1)):
            every.append(max(result.load_ms[:2]))
    divisions = Pairs(problem, nodes).divisions(devices, 0, 1, (1e6, 1e6), 10**6)
    assert (divisions is None) == (not every)
    if divisions is None:
        return
    best = int(divisions.most_ms.argmin())
    found = [0 if node in held else device for node, device in enumerate(devices)]
    for node in divisions.theirs(best):
        found[node] = 1
    result = costs.evaluate(problem, nodes.spread(found))
    assert result.load_ms[:2] == pytest.approx(
        (divisions.one_ms[best], divisions.other_ms[best]), abs=1e-9
    )
    assert divisions.most_ms[best] == pytest.approx(min(every), abs=1e-9)


def test_few_labels_still_tell_true_loads(chain):
    problem = Problem.from_request(
        chain([1.0 + 0.01 * i for i in range(12)], constraints=Constraints(contiguous=False))
    )
    divisions = Pairs(problem, reduced(problem)).divisions([0] * 12, 0, 1, (100.0, 100.0), 5)
    assert 1 <= len(divisions.one_ms) <= 5
    for way in range(len(divisions.one_ms)):
        devices = [int(node in divisions.theirs(way)) for node in range(12)]
        load = costs.evaluate(problem, devices).load_ms
        assert load[:2] == pytest.approx((divisions.one_ms[way], divisions.other_ms[way]))


def test_no_way_is_longer_than_what_is_allowed(chain):
    problem = Problem.from_request(
        chain([2.0] * 6, devices=2, constraints=Constraints(contiguous=False))
    )
    pairs = Pairs(problem, reduced(problem))
    assert pairs.divisions([0] * 6, 0, 1, (5.9, 5.9), 100) is None
    assert pairs.divisions([0] * 6, 0, 1, (6.1, 6.1), 100).most_ms.min() == 6.0


def test_borders_of_too_many_states_are_refused(chain, monkeypatch):
    monkeypatch.setattr(pair_sweep, "MOST_STATES", 1)
    problem = Problem.from_request(
        chain([1.0] * 6, value_bytes=1, constraints=Constraints(contiguous=False))
    )
    with pytest.raises(TooWide):
        Pairs(problem, reduced(problem)).divisions([0] * 6, 0, 1, (100.0, 100.0), 100)


def test_of_more_states_than_labels_each_keeps_one(chain):
    problem = Problem.from_request(
        chain([1.0] * 6, value_bytes=1, constraints=Constraints(contiguous=False))
    )
    divisions = Pairs(problem, reduced(problem)).divisions([0] * 6, 0, 1, (100.0, 100.0), 1)
    devices = [int(node in divisions.theirs(0)) for node in range(6)]
    assert costs.evaluate(problem, devices).load_ms[:2] == pytest.approx(
        (divisions.one_ms[0], divisions.other_ms[0])
    )
