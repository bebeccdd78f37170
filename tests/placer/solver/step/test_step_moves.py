"""Small changes of assignments, and rounds through the devices."""

from random import Random

import pytest

from placer.schema import Constraints, Device
from placer.solver.problem import Problem
from placer.solver.reduce import reduced
from placer.solver.step import step_moves

FREE = Constraints(contiguous=False)


def indexed(request):
    problem = Problem.from_request(request)
    return problem, reduced(problem)


def test_rounds_deal_equal_layers_out_evenly(chain):
    problem, nodes = indexed(chain([1.0] * 8, devices=2, constraints=FREE))
    assert step_moves.rounds(problem, nodes, [0, 1], 2) == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_faster_device_gets_more_of_a_round(chain):
    request = chain([1.0] * 9, devices=2, constraints=FREE)
    layers = [
        la.model_copy(update={"forward_ms": {"t": 1.0, "fast": 0.5}})
        for la in request.profile.layers
    ]
    devices = [request.devices[0], Device(name="d1", type="fast", memory_bytes=1000)]
    cluster = request.placed_on.model_copy(update={"devices": tuple(devices)})
    profile = request.profile.model_copy(update={"layers": tuple(layers)})
    problem, nodes = indexed(request.model_copy(update={"profile": profile, "cluster": cluster}))
    assert step_moves.rounds(problem, nodes, [0, 1], 1) == [0] * 3 + [1] * 6


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_small_change_moves_layers_across_one_cut(chain, contiguous):
    problem, nodes = indexed(
        chain([1.0] * 6, devices=3, constraints=Constraints(contiguous=contiguous))
    )
    found = [change() for change in step_moves.changes(problem, nodes, [0, 0, 1, 1, 2, 2])]
    assert (
        [0, 1, 1, 1, 2, 2] in found and [0, 0, 0, 1, 2, 2] in found and [0, 0, 0, 0, 2, 2] in found
    )
    assert all(devices != [0, 0, 1, 1, 2, 2] for devices in found)


def test_most_of_a_long_stage_may_move_at_once(chain):
    problem, nodes = indexed(chain([1.0] * 101, devices=2))
    found = [change() for change in step_moves.changes(problem, nodes, [0] * 100 + [1])]
    assert [0] * 36 + [1] * 65 in found


def test_unlike_devices_are_swapped(chain):
    request = chain([1.0] * 4, devices=2)
    devices = (request.devices[0], request.devices[1].model_copy(update={"memory_bytes": 5}))
    cluster = request.placed_on.model_copy(update={"devices": devices})
    problem, nodes = indexed(request.model_copy(update={"cluster": cluster}))
    assert [1, 1, 0, 0] in [change() for change in step_moves.changes(problem, nodes, [0, 0, 1, 1])]


def test_a_climb_ends_where_no_small_change_is_better(chain):
    problem, nodes = indexed(chain([1.0] * 8, devices=2))

    def value(devices):
        return max(devices.count(0), devices.count(1))

    found = step_moves.climb(problem, nodes, [0] * 7 + [1], value, lambda: False)
    assert value(found) == 4
    assert all(value(change()) >= 4 for change in step_moves.changes(problem, nodes, found))


def test_a_climb_that_is_over_stays_where_it_is(chain):
    problem, nodes = indexed(chain([1.0] * 8, devices=2))
    start = [0] * 7 + [1]
    assert (
        step_moves.climb(problem, nodes, start, lambda devices: devices.count(0), lambda: True)
        == start
    )


def test_a_kick_is_the_same_for_the_same_seed(chain):
    problem, nodes = indexed(chain([1.0] * 12, devices=3))
    start = [0] * 4 + [1] * 4 + [2] * 4
    one, other = (step_moves.kicked(problem, nodes, start, Random(5)) for _ in range(2))
    assert one == other != start
