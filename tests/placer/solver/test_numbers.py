"""How many devices are used, and how many layers they hold."""

from collections import Counter

import pytest

from placer.errors import InputError
from placer.schema import Constraints
from placer.solver.solve import solve


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_exactly_so_many_devices_are_used_though_transfers_make_one_the_fastest(
    chain, number, contiguous
):
    rules = Constraints(min_devices=number, max_devices=number, contiguous=contiguous)
    placement = solve(chain([1, 1, 1, 1], devices=3, value_bytes=100, constraints=rules))
    assert placement.status == "optimal" and len(placement.stages) == number
    # each cut costs 100 ms at both of its ends
    assert placement.objective_value == {1: 4, 2: 102, 3: 201}[number]


@pytest.mark.parametrize("contiguous", [True, False])
def test_no_device_holds_more_layers_than_it_may(chain, contiguous):
    rules = Constraints(max_layers=2, contiguous=contiguous)
    placement = solve(chain([9, 1, 1, 1], devices=2, constraints=rules))
    assert max(Counter(placement.layer_devices.values()).values()) == 2
    assert placement.objective_value == 10


def test_layers_that_must_be_together_and_are_too_many_are_named(chain):
    rules = Constraints(max_layers=2, colocated=(("l0", "l1", "l2"),))
    why = solve(chain([1, 1, 1, 1], constraints=rules)).infeasible
    assert why.reason == "max_layers = 2: layers 'l0', 'l1', 'l2' must share a device, 3 in all"


def test_more_layers_than_all_devices_may_hold_is_infeasible(chain):
    why = solve(chain([1] * 5, constraints=Constraints(max_layers=2))).infeasible
    assert why.reason == "max_layers = 2: no more than 4 layers fit on 2 devices; there are 5"


def test_fewer_parts_than_devices_demanded_is_infeasible(chain):
    rules = Constraints(min_devices=2, colocated=(("l0", "l1"),))
    assert "min_devices = 2" in solve(chain([1, 1], constraints=rules)).infeasible.reason


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"min_devices": 3}, "the cluster has 2 devices"),
        ({"min_devices": 2, "max_devices": 1}, "constraints.max_devices is 1"),
    ],
)
def test_a_number_of_devices_that_cannot_be_is_refused_before_solving(chain, rules, words):
    with pytest.raises(InputError, match=words):
        chain([1, 1, 1], constraints=Constraints(**rules))
