"""Nodes that some best placement has together, made one."""

import itertools
from dataclasses import replace
from random import Random

import pytest

from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver import costs, ideals
from placer.solver.merges import merged
from placer.solver.problem import Problem
from placer.solver.reduce import reduced

TIMES = (0.0, 0.5, 1.0, 2.0, 3.0, 6.0)
BYTES = (0, 1, 2, 4, 8)


def drawn(seed):
    """4 to 6 layers on 3 devices behind links of 1 byte per ms; some unordered, some devices free of transfers."""
    random = Random(seed)
    names = [f"l{index}" for index in range(random.randint(4, 5))]
    training = random.random() < 0.5
    slow = random.choice((1.0, 3.0))
    layers = [
        Layer(
            name=name,
            forward_ms={"t": (time := random.choice(TIMES)), "cpu": slow * time},
            backward_ms={"t": 0.0, "cpu": 0.0} if training else {},
            param_bytes=random.choice((0, 0, 1, 3)),
        )
        for name in names
    ]
    edges = [
        Edge(
            source=source,
            targets=random.sample(names[index + 1 :], random.choice((1, 1, min(2, len(names) - index - 1)))),
            bytes=random.choice(BYTES),
            gradient_bytes=random.choice(BYTES) if training else 0,
        )
        for index, source in enumerate(names[:-1])
        if random.random() < 0.85
    ]
    kind = random.choice(("t", "cpu"))
    limit = random.choice((4, 7, 1_000))
    devices = [Device(name=f"d{i}", type=kind if i == 2 else "t", memory_bytes=limit) for i in range(3)]
    links = [
        Link(source=a.name, target=b.name, bandwidth_bytes_per_s=1e3) for a, b in itertools.permutations(devices, 2)
    ]
    profile = Profile(layers=layers, edges=edges, training=training, cluster=Cluster(devices=devices, links=links))
    problem = Problem.from_request(
        PlacementRequest(profile=profile, constraints=Constraints(contiguous=True), schedule="fill-drain")
    )
    weightless = random.random() < 0.7
    values = tuple(replace(value, ordered=random.random() < 0.8, weightless=weightless) for value in problem.values)
    gradients = any(value.gradient_bytes for value in values)
    untaxed = frozenset({2}) if kind == "cpu" and random.random() < 0.5 else frozenset()
    return replace(problem, values=values, multicast=not gradients and random.random() < 0.5, untaxed=untaxed)


def best_of(problem, nodes):
    """The smallest bottleneck of all assignments of the nodes; None if none meets the requirements."""
    best = None
    for choice in itertools.product(range(len(problem.devices)), repeat=len(nodes.nodes)):
        devices = nodes.spread(list(choice))
        if costs.allowed(problem, devices):
            result = costs.evaluate(problem, devices)
            if result is not None and costs.fits(problem, result) and (best is None or result.objective_value < best):
                best = result.objective_value
    return best


@pytest.fixture(scope="module")
def enumerated():
    """Problems with the nodes of each and the smallest bottleneck of all assignments, where there is one above 0."""
    problems = [drawn(seed) for seed in range(80)]
    found = [(problem, nodes, best_of(problem, nodes)) for problem in problems for nodes in [reduced(problem)]]
    return [each for each in found if each[2]]


def test_the_optimum_of_the_merged_graph_is_that_of_the_whole(enumerated):
    fewer = 0
    for problem, nodes, best in enumerated:
        small = merged(problem, nodes, best)
        fewer += len(small.nodes) < len(nodes.nodes)
        assert best_of(problem, small) == pytest.approx(best, rel=1e-9)
    assert fewer > 40


def test_merging_for_more_than_the_optimum_keeps_it_too(enumerated):
    for problem, nodes, best in enumerated:
        assert best_of(problem, merged(problem, nodes, 1.3 * best)) == pytest.approx(best, rel=1e-9)


def test_the_best_chain_of_ideals_is_the_optimum_or_a_bound_below_it(enumerated):
    exactly = 0
    for problem, nodes, best in enumerated:
        assert ideals.applies(problem)
        chain = ideals.best_chain(problem, nodes)
        assert chain.bound <= best * (1 + 1e-12)
        exactly += chain.bound >= best * (1 - 1e-8)
    assert exactly > len(enumerated) / 2


def test_too_many_ideals_are_left_alone(chain):
    problem = Problem.from_request(chain([1.0] * 3))
    apart = replace(problem, values=())
    assert ideals.best_chain(apart, reduced(apart)).bound == pytest.approx(2.0)
    many = replace(Problem.from_request(chain([1.0] * 12)), values=(), contiguous=True)
    assert ideals.best_chain(many, reduced(many)) is None


def test_a_layer_goes_with_the_one_that_it_exchanges_most_with(chain):
    # l1 brought to l0 saves both stages the 5 between them, for 2 of work; its value to l2 costs nothing
    problem = Problem.from_request(chain([4.0, 2.0, 4.0]))
    heavy, _ = problem.values
    problem = replace(problem, values=(replace(heavy, bytes=5), problem.values[1]))
    nodes = merged(problem, reduced(problem), 100.0)
    assert [sorted(layers) for layers in nodes.nodes] == [[0, 1], [2]]


def test_layers_that_cannot_part_within_the_bottleneck_are_together(chain):
    # a stage with l1 and without l0 takes 3 + 3 at the least
    problem = Problem.from_request(chain([3.0, 3.0, 3.0, 3.0], value_bytes=3))
    assert len(merged(problem, reduced(problem), 5.9).nodes) == 1
    assert len(merged(problem, reduced(problem), 9.0).nodes) > 1
