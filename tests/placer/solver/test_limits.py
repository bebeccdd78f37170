"""What limits a placement, and what would help."""

import pytest

from placer.errors import PlacementError
from placer.schema import Constraints
from placer.solver.check import check
from placer.solver.solve import solve


def changes(placement):
    return {help.change: help.speedup for help in placement.limits.helps}


def test_nothing_is_explained_unless_asked_for(chain):
    assert solve(chain([1.0] * 4)).limits is None


def test_a_device_more_shares_the_work(chain):
    placement = solve(chain([1.0] * 12, devices=3, explain=True))
    assert placement.limits.kind == "work"
    assert changes(placement)["one device more"] == pytest.approx(4 / 3)


def test_one_long_layer_is_what_limits_and_no_change_helps(chain):
    placement = solve(chain([1.0, 9.0, 1.0], devices=3, explain=True))
    assert placement.limits.kind == "layer" and "l1" in placement.limits.what
    assert placement.limits.helps == ()


def test_links_limit_where_transfers_outweigh_compute(chain):
    apart = Constraints(pinned={"l0": "d0", "l1": "d1"})
    placement = solve(chain([1.0, 1.0], value_bytes=10, constraints=apart, explain=True))
    assert placement.limits.kind == "link"
    assert changes(placement)["links twice as fast"] == pytest.approx(11 / 6)  # 1 + 10 ms, then 1 + 5


def test_memory_limits_where_more_of_it_is_faster(chain):
    # l1 and l2 do not fit together: one of them is with l0, 5 + 1; where they do, it is 5 against 2
    request = chain([5.0, 1.0, 1.0], param_bytes=[100, 600, 600], memory_bytes=1_000, explain=True)
    placement = solve(request)
    assert placement.objective_value == 6.0
    assert placement.limits.kind == "memory"
    more = [speedup for change, speedup in changes(placement).items() if "more on d" in change]
    assert more and max(more) == pytest.approx(6 / 5)


def test_one_device_alone_can_be_explained(chain):
    placement = solve(chain([1.0] * 4, devices=1, explain=True))
    assert placement.limits.kind == "work"


def test_limits_that_were_not_asked_for_are_caught(chain):
    request = chain([1.0] * 12, devices=3, explain=True)
    placement = solve(request)
    with pytest.raises(PlacementError):
        check(request.model_copy(update={"explain": False}), placement)


def test_a_help_that_does_not_add_up_is_caught(chain):
    request = chain([1.0] * 12, devices=3, explain=True)
    placement = solve(request)
    help = placement.limits.helps[0]
    wrong = placement.limits.model_copy(update={"helps": (help.model_copy(update={"speedup": 2 * help.speedup}),)})
    with pytest.raises(PlacementError, match="speedup"):
        check(request, placement.model_copy(update={"limits": wrong}))
