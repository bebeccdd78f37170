"""Cuts whose devices come class by class, against trying every assignment."""

import itertools
from dataclasses import replace

import pytest
from small_graphs import least_bottleneck

from placer.solver import costs
from placer.solver.chain import initial_placements, optimal_cuts
from placer.solver.problem import Problem
from placer.solver.reduce import reduced

SLOW = 10.0


def on_two_hosts(chain, first_ms, then_ms, size_bytes):
    """Return a row of layers on two hosts of two devices, with links ten times slower between.

    The types of the two hosts run the same layers, in other times.
    """
    asked = chain([1.0] * len(size_bytes), devices=4, value_bytes=1)
    problem = Problem.from_request(asked)
    links = tuple(
        tuple(
            link
            and link.model_copy(
                update={"bandwidth_bytes_per_s": 1e3 if (a < 2) == (b < 2) else 1e3 / SLOW}
            )
            for b, link in enumerate(row)
        )
        for a, row in enumerate(problem.links)
    )
    devices = [
        device.model_copy(update={"type": "t" if at < 2 else "u"})
        for at, device in enumerate(problem.devices)
    ]
    return replace(
        problem,
        devices=tuple(devices),
        links=links,
        forward_ms=tuple((a, a, b, b) for a, b in zip(first_ms, then_ms, strict=True)),
        values=tuple(replace(value, bytes=size_bytes[value.source]) for value in problem.values),
    )


def bottlenecks(problem):
    return [
        costs.evaluate(problem, devices).objective_value
        for devices in initial_placements.cuts(problem, reduced(problem))
    ]


def test_what_passes_between_hosts_is_cut_where_it_is_small(chain):
    """Over the fastest link layers would take turns: each is quick on another host."""
    quick, slow = [1.0, 3.0] * 4, [3.0, 1.0] * 4
    problem = on_two_hosts(chain, quick, slow, [1, 1, 1, 0, 1, 1, 1, 0])
    best = least_bottleneck(replace(problem, contiguous=True))
    assert min(bottlenecks(problem)) == pytest.approx(best)
    assert optimal_cuts.best_cut(problem, reduced(problem)).value >= best


def test_the_quicker_host_comes_where_its_layers_are(chain):
    problem = on_two_hosts(chain, [6.0] * 4 + [1.0] * 4, [1.0] * 4 + [6.0] * 4, [0] * 8)
    assert min(bottlenecks(problem)) == pytest.approx(2.0)


def test_devices_that_make_a_row_longer_hold_nothing(chain):
    """One device does all in 4 ms, while a value between two takes as long."""
    problem = on_two_hosts(chain, [1.0] * 4, [1.0] * 4, [4, 4, 4, 4])
    assert min(bottlenecks(problem)) == 4.0


def test_memory_is_that_of_each_device(chain):
    problem = Problem.from_request(chain([1.0] * 4, devices=4, param_bytes=10, value_bytes=1))
    rooms = [
        device.model_copy(update={"memory_bytes": 10 if at < 2 else 30})
        for at, device in enumerate(problem.devices)
    ]
    links = [list(row) for row in problem.links]
    for a, b in itertools.product((0, 1), (2, 3)):
        links[a][b] = links[b][a] = links[a][b].model_copy(update={"latency_s": 0.001})
    problem = replace(problem, devices=tuple(rooms), links=tuple(map(tuple, links)))
    for devices in initial_placements.cuts(problem, reduced(problem)):
        assert max(map(devices.count, (0, 1))) <= 1


def test_where_all_links_are_alike_there_is_no_such_cut(chain):
    problem = Problem.from_request(chain([1.0] * 4, devices=4))
    assert not list(initial_placements.cuts(problem, reduced(problem)))
