"""What limits a placement, and what would help."""

import pytest

from placer.errors import PlacementError
from placer.schema import Constraints
from placer.solver.check import check
from placer.solver.explain.limits import limits_of
from placer.solver.solve import solve


def changes(placement):
    return {help.change: help.speedup for help in placement.limits.improvements}


def test_nothing_is_explained_unless_asked_for(chain):
    assert solve(chain([1.0] * 4)).limits is None


def test_a_device_more_shares_the_work(chain):
    placement = solve(chain([1.0] * 12, devices=3, explain=True))
    assert placement.limits.kind == "compute"
    assert changes(placement)["one device more"] == pytest.approx(4 / 3)


def test_one_long_layer_is_what_limits_and_no_change_helps(chain):
    placement = solve(chain([1.0, 9.0, 1.0], devices=3, explain=True))
    assert placement.limits.kind == "layer" and "l1" in placement.limits.detail
    assert placement.limits.improvements == ()


def test_links_limit_where_transfers_outweigh_compute(chain):
    apart = Constraints(pinned={"l0": "d0", "l1": "d1"})
    placement = solve(chain([1.0, 1.0], value_bytes=10, constraints=apart, explain=True))
    assert placement.limits.kind == "link"
    # 1 + 10 ms, then 1 + 5
    assert changes(placement)["links twice as fast"] == pytest.approx(11 / 6)


@pytest.mark.parametrize(("value_bytes", "names"), [(4, []), (20, ["links twice as fast"])])
def test_a_gain_that_would_be_shown_as_1_00x_is_left_out(chain, value_bytes, names):
    apart = Constraints(pinned={"l0": "d0", "l1": "d1"})
    placement = solve(chain([1e3] * 2, value_bytes=value_bytes, constraints=apart, explain=True))
    # 1004 ms are 1.002 times as long as 1002 ms, 1020 ms 1.0099 times as long as 1010 ms
    assert [change for change in changes(placement) if "links" in change] == names


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
    assert placement.limits.kind == "compute"


def test_limits_that_were_not_asked_for_are_caught(chain):
    request = chain([1.0] * 12, devices=3, explain=True)
    placement = solve(request)
    with pytest.raises(PlacementError):
        check(request.model_copy(update={"explain": False}), placement)


def test_a_help_that_does_not_add_up_is_caught(chain):
    request = chain([1.0] * 12, devices=3, explain=True)
    placement = solve(request)
    help = placement.limits.improvements[0]
    wrong = placement.limits.model_copy(
        update={"improvements": (help.model_copy(update={"speedup": 2 * help.speedup}),)}
    )
    with pytest.raises(PlacementError, match="speedup"):
        check(request, placement.model_copy(update={"limits": wrong}))


def test_the_largest_memory_is_less_with_a_device_more(chain):
    placement = solve(
        chain([1.0] * 6, param_bytes=100, devices=2, objective="memory", explain=True)
    )
    assert placement.limits.kind == "memory"
    assert placement.limits.detail == "d0 holds 300 B, 300 B of it for parameters"
    assert changes(placement)["one device more"] == pytest.approx(3 / 2)


def test_fewer_devices_do_where_each_may_be_busy_longer(chain):
    # 12 layers of 1 ms within 3.7 ms: 3 on each of 4; within 4.07 ms, 4 on each of 3
    placement = solve(
        chain([1.0] * 12, devices=5, objective="devices", bottleneck_ms=3.7, explain=True)
    )
    assert placement.objective_value == 4
    assert (
        placement.limits.kind == "compute"
        and "12 ms in all; a device may be busy for 3.7 ms" in placement.limits.detail
    )
    assert changes(placement) == {"bottleneck_ms = 4.07": pytest.approx(4 / 3)}


def test_memory_can_be_what_asks_for_more_devices(chain):
    request = chain(
        [1.0] * 4, devices=4, param_bytes=600, objective="devices", bottleneck_ms=100, explain=True
    )
    placement = solve(request)
    assert (
        placement.limits.kind == "memory"
        and placement.limits.detail == "memory: without its limits 1 instead of 4"
    )


def test_a_pin_that_costs_time_is_a_rule_that_would_help_by_going(chain):
    request = chain(
        [1.0] * 4, constraints=Constraints(pinned={f"l{i}": "d0" for i in range(3)}), explain=True
    )
    assert changes(solve(request))["without pins"] == pytest.approx(3 / 2)


def test_one_more_of_the_devices_that_are_there_would_help_where_not_all_may_be_used(chain):
    request = chain([1.0] * 6, devices=3, constraints=Constraints(max_devices=2), explain=True)
    assert changes(solve(request))["max_devices = 3"] == pytest.approx(3 / 2)


@pytest.mark.parametrize(("solve_time_s", "most_s"), [(0.01, 1.0), (0.5, 5.0), (20.0, 60.0)])
def test_the_time_of_a_change_follows_the_time_of_the_solve(chain, solve_time_s, most_s):
    """The last change, to free stages, is not proven: it took all of the time limit."""
    request = chain([1.0] * 12, devices=3)
    placement = solve(request).model_copy(update={"solve_time_s": solve_time_s})
    allowed_s = []

    def solve_at_once(asked):
        allowed_s.append(asked.time_limit_s)
        return placement

    limits_of(request, placement, solve_at_once, 60.0)
    assert max(allowed_s) == pytest.approx(most_s, rel=0.01)


def test_a_step_is_shorter_with_a_device_more(chain):
    # 6 micro-batches' inference: one way of 6 ms, then 5 times the longest stage, of 3 layers or of
    # 2
    placement = solve(
        chain([1.0] * 6, devices=2, objective="step", chunks=6, schedule="auto", explain=True)
    )
    assert changes(placement)["one device more"] == pytest.approx((6 + 5 * 3) / (6 + 5 * 2))
