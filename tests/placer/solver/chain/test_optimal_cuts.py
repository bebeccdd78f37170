"""Which cut is taken where values go to several devices, one after another."""

import itertools
from random import Random

import pytest

from placer.schema import Cluster, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver import costs
from placer.solver.chain import optimal_cuts
from placer.solver.problem import Problem
from placer.solver.reduce import reduced


def with_long_values(random, layers=12, devices=6):
    """Return layers in a row, each of whose values some later ones read, too; 1 byte per ms."""
    names, held = (
        [f"l{index}" for index in range(layers)],
        [f"d{index}" for index in range(devices)],
    )
    profile = Profile(
        layers=[Layer(name=name, forward_ms={"t": random.uniform(1, 3)}) for name in names],
        edges=[
            Edge(
                source=name,
                targets=sorted({later[0], random.choice(later)}),
                bytes=random.randint(0, 2),
            )
            for index, name in enumerate(names[:-1])
            for later in [names[index + 1 :]]
        ],
        cluster=Cluster(
            devices=[Device(name=name, type="t", memory_bytes=1_000) for name in held],
            links=[
                Link(source=a, target=b, bandwidth_bytes_per_s=1e3)
                for a, b in itertools.permutations(held, 2)
            ],
        ),
    )
    return Problem.from_request(PlacementRequest(profile=profile))


def cuts_by_number(problem, nodes):
    """Return the cut that the table has for each number of devices."""
    classes, _ = optimal_cuts.device_classes(problem)
    table = optimal_cuts.CutTable(
        problem, nodes, [[node] for node in range(len(nodes.nodes))], classes
    )
    table.fill()
    return [table.read(counts) for counts in table.best if sum(counts)]


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("seed", range(30))
def test_it_is_the_best_of_those_for_all_numbers_of_devices(seed):
    problem = with_long_values(Random(seed))
    nodes = reduced(problem)
    best = min(
        costs.evaluate(problem, cut).objective_value for cut in cuts_by_number(problem, nodes)
    )
    found = optimal_cuts.best_cut(problem, nodes)
    assert found.value == costs.evaluate(problem, found.devices).objective_value == best


def test_numbers_of_devices_that_cannot_be_the_best_are_not_looked_at(monkeypatch):
    problem = with_long_values(Random(0))
    looked_at = []
    evaluate = costs.evaluate
    monkeypatch.setattr(
        costs, "evaluate", lambda *given: looked_at.append(given) or evaluate(*given)
    )
    optimal_cuts.best_cut(problem, reduced(problem))
    assert 0 < len(looked_at) < len(problem.devices)
