"""Of placements with as small an objective: less transfer, then better balance."""

import itertools

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from placer.errors import PlacementError
from placer.schema import Constraints
from placer.solver.check import check
from placer.solver.solve import solve

SETTINGS = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def rank(request, enumeration, where):
    """Time of all transfers at both ends, and the difference of compute times: by the enumeration's own reading."""
    kinds = {device.name: device.type for device in request.devices}
    busy = {}
    for layer in request.profile.layers:
        device = where[layer.name]
        back = layer.backward_ms[kinds[device]] if request.is_training else 0
        busy[device] = busy.get(device, 0) + layer.forward_ms[kinds[device]] + back
    transfer = 0
    for number, a, b in enumeration.sends(where):
        edge = request.profile.edges[number]
        transfer += 2 * enumeration.link[a, b].transfer_ms(edge.bytes)
        if request.is_training and edge.gradient_bytes:
            transfer += 2 * enumeration.link[b, a].transfer_ms(edge.gradient_bytes)
    return transfer, max(busy.values()) - min(busy.values())


@SETTINGS
@given(data=st.data())
def test_no_placement_as_good_has_a_smaller_rank(data, strategies, enumeration):
    request = data.draw(strategies.requests()).model_copy(update={"break_ties": True})
    placement = solve(request)
    assume(placement.layer_devices)
    every = enumeration(request, placement.contiguous)
    names = [layer.name for layer in request.profile.layers]
    ranks = []
    for choice in itertools.product([device.name for device in request.devices], repeat=len(names)):
        where = dict(zip(names, choice, strict=True))
        value = every.value(where)
        if value is not None and value <= placement.objective_value * (1 + 1e-9):
            ranks.append(rank(request, every, where))
    transfer = min(ranks)[0]
    assert placement.ties.proven
    assert placement.ties.transfer_ms == pytest.approx(transfer, abs=1e-4)
    spread = min(spread for other, spread in ranks if other <= transfer + 1e-9)
    assert placement.ties.spread_ms == pytest.approx(spread, abs=1e-4)


def test_a_long_layer_leaves_the_others_in_balance(chain):
    # l0 is the bottleneck; whatever else is cut, one device has 9 and the others share 3 + 3
    request = chain([9, 3, 3], devices=3, constraints=Constraints(min_devices=3), break_ties=True)
    assert sorted(load.compute_ms for load in solve(request).devices) == [3, 3, 9]


def test_a_wrong_tie_is_caught(chain):
    request = chain([9, 3, 3], break_ties=True)
    placement = solve(request)
    ties = placement.ties.model_copy(update={"transfer_ms": placement.ties.transfer_ms + 1})
    with pytest.raises(PlacementError, match=r"ties\.transfer_ms"):
        check(request, placement.model_copy(update={"ties": ties}))


def test_ties_are_left_alone_unless_it_is_asked_for(chain):
    assert solve(chain([9, 3, 3])).ties is None


@SETTINGS
@given(data=st.data())
def test_no_placement_on_as_few_devices_has_a_smaller_rank(data, strategies, enumeration):
    asked = data.draw(strategies.requests(objectives=("throughput",)))
    most_ms = data.draw(st.sampled_from([4.1, 8.0, 12.0, 20.0, 40.0]))
    placement = solve(asked.model_copy(update={"objective": "devices", "bottleneck_ms": most_ms, "break_ties": True}))
    assume(placement.layer_devices)
    every = enumeration(asked, placement.contiguous)
    names = [layer.name for layer in asked.profile.layers]
    ranks = []
    for choice in itertools.product([device.name for device in asked.devices], repeat=len(names)):
        where = dict(zip(names, choice, strict=True))
        bottleneck = every.value(where)
        if bottleneck is not None and bottleneck <= most_ms and len(set(choice)) <= placement.objective_value:
            ranks.append(rank(asked, every, where))
    transfer = min(ranks)[0]
    assert placement.ties.proven
    assert placement.ties.transfer_ms == pytest.approx(transfer, abs=1e-4)
    spread = min(spread for other, spread in ranks if other <= transfer + 1e-9)
    assert placement.ties.spread_ms == pytest.approx(spread, abs=1e-4)


def test_as_few_devices_share_the_work_evenly(chain):
    request = chain([1] * 8, devices=4, objective="devices", bottleneck_ms=6, break_ties=True)
    placement = solve(request)
    assert sorted(load.compute_ms for load in placement.devices) == [0, 0, 4, 4] and placement.ties.proven


def test_of_as_short_steps_the_best_balanced_is_taken(chain):
    # inference: the way through all and 3 times the longest stage, l0; the others are shared as evenly as can be
    request = chain([9, 3, 3], devices=3, objective="step", chunks=4, break_ties=True)
    rules = Constraints(min_devices=3)
    placement = solve(request.model_copy(update={"constraints": rules}))
    assert sorted(load.compute_ms for load in placement.devices) == [3, 3, 9] and placement.ties.proven
