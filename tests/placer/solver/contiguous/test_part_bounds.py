"""Some layers alone: a bound for all of them."""

from itertools import pairwise
from random import Random

import pytest
from small_graphs import best_of, drawn

from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver import costs
from placer.solver.contiguous import stage_search
from placer.solver.contiguous.stage_search import part_of, parts
from placer.solver.problem import Problem
from placer.solver.reduce import reduced
from placer.solver.search import Search


def test_no_layers_alone_take_longer_than_all_do():
    smaller = 0
    for seed in range(100):
        problem, random = drawn(seed), Random(seed)
        best = best_of(problem, reduced(problem))
        if best is None:
            continue
        layers = sorted(
            random.sample(range(len(problem.layers)), random.randint(2, len(problem.layers) - 1))
        )
        part = part_of(problem, layers)
        found = best_of(part, reduced(part))
        assert found is not None and found <= best * (1 + 1e-12)
        smaller += found < best
    assert smaller > 12


def wide_at_the_beginning(light=20, devices=6):
    """Return four layers with large values, then many light ones in parallel pairs."""
    heavy = [Layer(name=f"h{index}", forward_ms={"t": 3.0}) for index in range(4)]
    rest = [Layer(name=f"l{index}", forward_ms={"t": 0.1}) for index in range(light)]
    edges = [Edge(source=f"h{i}", targets=[f"h{i + 1}"], bytes=(1, 2, 2)[i]) for i in range(3)]
    edges += [Edge(source="h3", targets=["l0", "l1"], bytes=2)]
    edges += [Edge(source=f"l{i}", targets=[f"l{i + 2}"], bytes=1) for i in range(light - 2)]
    places = [Device(name=f"d{index}", type="t", memory_bytes=1_000) for index in range(devices)]
    links = [
        Link(source=a.name, target=b.name, bandwidth_bytes_per_s=1e3)
        for a in places
        for b in places
        if a is not b
    ]
    profile = Profile(
        layers=[*heavy, *rest], edges=edges, cluster=Cluster(devices=places, links=links)
    )
    return Problem.from_request(
        PlacementRequest(profile=profile, constraints=Constraints(contiguous=True))
    )


@pytest.fixture
def begun():
    """Return a search with heavy layers on two stages, and light ones on two more."""
    problem = wide_at_the_beginning()
    search = Search(problem)
    search.offer([0, 0, 1, 1, *[2] * 10, *[3] * 10], "by hand")
    return search


def test_parts_are_ever_more_layers_around_the_busiest_stage(begun):
    found = list(parts(begun.problem, begun.best))
    busiest = costs.evaluate(begun.problem, begun.best).load_ms
    assert busiest[1] == max(busiest)
    assert {2, 3} < set(found[0])
    assert all(set(one) < set(other) for one, other in pairwise(found))
    assert len(found[-1]) < len(begun.best)


def test_a_part_alone_proves_what_the_work_of_all_does_not(begun):
    work_alone = (4 * 3.0 + 20 * 0.1) / 6
    stage_search._bound_by_parts(begun, work=10.0)
    four = part_of(begun.problem, range(4))
    assert begun.bound >= best_of(four, reduced(four)) * (1 - 1e-4) > work_alone


def test_a_part_that_can_be_placed_better_than_what_is_proven_is_not_looked_at(begun, monkeypatch):
    begun.prove(begun.value * 0.995)
    monkeypatch.setattr(stage_search, "sweep", lambda *_, **__: pytest.fail("a part was looked at"))
    monkeypatch.setattr(stage_search, "few_ideals", lambda *_: pytest.fail("a part was looked at"))
    stage_search._bound_by_parts(begun, work=10.0)
