"""The fewest devices for a required throughput, against trying every assignment."""

import pytest
from enumeration import Enumeration
from hypothesis import given
from hypothesis import strategies as st
from small_requests import examples, small_requests

from placer.errors import InputError, PlacementError
from placer.schema import Constraints
from placer.solver.check import check
from placer.solver.solve import solve

SETTINGS = examples(100)


@SETTINGS
@given(data=st.data())
def test_no_assignment_within_the_bottleneck_uses_fewer_devices(data):
    asked = data.draw(small_requests(objectives=("throughput",)))
    most_ms = data.draw(st.sampled_from([2.0, 4.1, 8.0, 12.0, 20.0, 40.0]))
    request = asked.model_copy(update={"objective": "devices", "bottleneck_ms": most_ms})
    placement = solve(request)
    every = Enumeration(asked, placement.contiguous)
    numbers = []
    for where in every.maps():
        bottleneck = every.value(where)
        if bottleneck is not None and bottleneck <= most_ms * (1 + 1e-9):
            numbers.append(len(set(where.values())))
    if not numbers:
        assert placement.status == "infeasible"
        return
    assert placement.status == "optimal"
    assert placement.objective_value == placement.bound == min(numbers)
    assert max(load.load_ms for load in placement.devices) <= most_ms * (1 + 1e-9)


def test_as_many_devices_as_the_throughput_needs(chain):
    for most_ms, devices in ((8, 1), (4, 2), (3.5, 3), (2, 4)):
        placement = solve(chain([1] * 8, devices=4, objective="devices", bottleneck_ms=most_ms))
        assert (placement.status, placement.objective_value) == ("optimal", devices)
        assert (placement.single_device.load_ms, placement.single_device.objective_value) == (8, 1)
        assert placement.speedup is None


def test_memory_can_need_more_devices_than_the_work_does(chain):
    placement = solve(
        chain([1] * 4, devices=4, param_bytes=600, objective="devices", bottleneck_ms=100)
    )
    assert placement.objective_value == 4


def test_a_throughput_that_no_placement_reaches_says_how_near_one_comes(chain):
    why = solve(chain([1, 5, 1], devices=3, objective="devices", bottleneck_ms=4)).infeasible
    assert why.reason == (
        "bottleneck_ms = 4: whatever the placement, some device is busy for 5 ms or more, "
        "5 ms where it is shortest"
    )


def test_a_bottleneck_is_one_of_the_requirements_that_cannot_hold_together(chain):
    rules = Constraints(max_devices=2, pinned={"l0": "d0"})
    why = solve(
        chain([1] * 8, devices=4, objective="devices", bottleneck_ms=2, constraints=rules)
    ).infeasible
    assert why.requirements == ("max_devices = 2", "bottleneck_ms = 2")


def test_links_that_are_missing_do_not_make_those_that_are_there_free(chain):
    # Two devices would do if a value took no time; over their link it takes 10 ms. Two of three
    # have none.
    request = chain([1, 1], devices=3, value_bytes=10, objective="devices", bottleneck_ms=1.5)
    links = [link for link in request.placed_on.links if {link.source, link.target} != {"d1", "d2"}]
    cluster = request.placed_on.model_copy(update={"links": tuple(links)})
    why = solve(request.model_copy(update={"cluster": cluster})).infeasible
    assert "bottleneck_ms = 1.5" in why.requirements and why.minimal


def test_the_number_of_devices_may_be_bounded_too(chain):
    rules = Constraints(max_devices=2)
    assert solve(
        chain([1] * 8, devices=4, objective="devices", bottleneck_ms=2, constraints=rules)
    ).infeasible
    rules = Constraints(min_devices=3)
    assert (
        solve(
            chain([1] * 8, devices=4, objective="devices", bottleneck_ms=9, constraints=rules)
        ).objective_value
        == 3
    )


@pytest.mark.parametrize("asked", [{"objective": "devices"}, {"bottleneck_ms": 2.0}])
def test_a_bottleneck_goes_with_the_objective_and_with_no_other(chain, asked):
    with pytest.raises(InputError, match="bottleneck_ms"):
        chain([1, 1], **asked)


def test_a_device_that_is_busier_than_asked_for_is_caught(chain):
    placement = solve(chain([1] * 4, objective="devices", bottleneck_ms=4))
    stricter = chain([1] * 4, objective="devices", bottleneck_ms=3)
    with pytest.raises(PlacementError, match="busy for more than 3"):
        check(stricter, placement.model_copy(update={"id": stricter.content_hash()}))


def test_what_one_device_takes_cannot_be_claimed_otherwise(chain):
    request = chain([1] * 4, objective="devices", bottleneck_ms=4)
    placement = solve(request)
    single = placement.single_device.model_copy(update={"load_ms": 3.0})
    with pytest.raises(PlacementError, match="what single_device does: 3"):
        check(request, placement.model_copy(update={"single_device": single}))
