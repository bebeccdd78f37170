"""The smallest group of requirements that cannot hold together, against all that each assignment meets."""

import itertools

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from placer.schema import Constraints
from placer.solver import conflict
from placer.solver.problem import Problem
from placer.solver.solve import solve

SETTINGS = settings(
    max_examples=70,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def met_sets(request, requirements, contiguous, enumeration):
    """What each assignment, in each shape and order of stages, meets: the numbers of the requirements."""
    names = [layer.name for layer in request.profile.layers]
    devices = [device.name for device in request.devices]
    found = set()
    for shape in [True, False] if contiguous else [False]:
        every = enumeration(request, shape)
        for choice in itertools.product(devices, repeat=len(names)):
            where = dict(zip(names, choice, strict=True))
            for use in every.uses(where):
                met = (meets(request, asked, where, use, shape, every) for asked in requirements)
                found.add(frozenset(number for number, holds in enumerate(met) if holds))
    return found


def meets(request, asked, where, use, shape, every):
    names, rules = list(where), request.constraints
    device = request.devices[asked.device]
    on = [where[names[layer]] for layer in asked.layers]
    counts = [list(where.values()).count(name) for name in set(where.values())]
    return {
        "pin": lambda: on == [device.name],
        "ban": lambda: device.name not in on,
        "group": lambda: len(set(on)) == 1,
        "contiguous": lambda: shape,
        "most": lambda: len(counts) <= rules.max_devices,
        "least": lambda: len(counts) >= rules.min_devices,
        "layers": lambda: max(counts) <= rules.max_layers,
        "links": lambda: every.can_pass(where),
        "limit": lambda: use[device.name] <= device.memory_bytes - device.reserve_bytes,
    }[asked.kind]()


@SETTINGS
@given(data=st.data())
def test_nothing_meets_the_group_and_something_meets_every_smaller_one(data, strategies, enumeration):
    request = data.draw(strategies.requests(objectives=("throughput",)))
    placement = solve(request)
    assume(placement.status == "infeasible")
    asked = conflict.requirements([Problem.from_request(request)])
    words = [requirement.words for requirement in asked]
    group = [words.index(text) for text in placement.infeasible.requirements]
    assert group and placement.infeasible.smallest
    met = met_sets(request, asked, placement.contiguous, enumeration)
    assert not any(numbers >= set(group) for numbers in met)
    for smaller in itertools.combinations(range(len(asked)), len(group) - 1):
        assert any(numbers >= set(smaller) for numbers in met)


def test_what_has_nothing_to_do_with_it_is_not_named(chain):
    rules = Constraints(
        pinned={"l0": "d0", "l1": "d0", "l3": "d1"}, forbidden={"l2": ("d0",)}, colocated=(("l1", "l2"),), max_devices=2
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
