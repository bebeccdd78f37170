"""Starts: what orders they cut, and when they end."""

from random import Random

import pytest

from placer.schema import Cluster, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver import search
from placer.solver.chain import initial_placements, optimal_cuts
from placer.solver.cpsat.runner import Meter
from placer.solver.problem import Problem
from placer.solver.reduce import reduced
from placer.solver.solve import Portfolio


@pytest.fixture
def branched():
    """Return 60 layers on two devices with slow links, each of which reads one of the first ten."""
    random = Random(1)
    layers = [
        Layer(name=f"l{index}", forward_ms={"t": random.uniform(1, 3)}) for index in range(60)
    ]
    readers = {source: [] for source in range(10)}
    for reader in range(10, 60):
        readers[random.randrange(10)].append(f"l{reader}")
    edges = [
        Edge(source=f"l{source}", targets=held, bytes=5) for source, held in readers.items() if held
    ]
    cluster = Cluster(
        devices=[Device(name=name, type="t", memory_bytes=1_000) for name in ("d0", "d1")],
        links=[
            Link(source=a, target=b, bandwidth_bytes_per_s=1e3)
            for a, b in (("d0", "d1"), ("d1", "d0"))
        ],
    )
    return PlacementRequest(
        profile=Profile(layers=layers, edges=edges, cluster=cluster), time_limit_s=10
    )


def by_definition(count, arcs, rank):
    """Of the nodes that are ready always the one that adds least to those that wait for readers."""
    order, left = [], set(range(count))
    while left:

        def opened(node):
            sources = [source for source, reader in arcs if reader == node]
            last = [
                all(one not in left or one == node for at, one in arcs if at == source)
                for source in sources
            ]
            return any(source == node for source, _ in arcs) - sum(last)

        ready = [
            node
            for node in left
            if not any(source in left for source, reader in arcs if reader == node)
        ]
        order.append(min(ready, key=lambda node: (opened(node), rank[node])))
        left.remove(order[-1])
    return order


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("seed", range(40))
def test_the_narrow_order_takes_the_node_that_leaves_fewest_waiting(seed):
    random = Random(seed)
    count = random.randint(2, 14)
    pairs = [(one, other) for one in range(count) for other in range(one + 1, count)]
    arcs = set(random.sample(pairs, random.randint(0, min(len(pairs), 2 * count))))
    rank = [random.random() for _ in range(count)]
    assert initial_placements._narrow_order(count, arcs, rank) == by_definition(count, arcs, rank)


def test_orders_are_cut_until_the_search_is_over_and_each_is_counted(branched):
    problem, works = Problem.from_request(branched), []
    found = initial_placements.other_orders(
        problem, reduced(problem), lambda work: works.append(work) or len(works) > 2
    )
    assert len(list(found)) == 2
    assert len(set(works)) == 1 and works[0] > 0


@pytest.fixture
def cuts(monkeypatch):
    """Return the orders that are cut."""
    found, best_cut = [], optimal_cuts.best_cut
    monkeypatch.setattr(
        optimal_cuts, "best_cut", lambda *given: found.append(given) or best_cut(*given)
    )
    return found


def test_no_more_orders_are_cut_when_the_time_is_over(branched, cuts, monkeypatch):
    clock = iter(range(1_000_000))
    monkeypatch.setattr(search, "monotonic", lambda: 4.0 * next(clock))
    monkeypatch.setattr(initial_placements, "PATIENCE", 20)
    placement = Portfolio(Problem.from_request(branched), began=0.0).answer()
    assert placement.status == "feasible" and len(cuts) == 1


def test_no_more_orders_are_cut_when_the_work_is_done(branched, cuts, monkeypatch):
    monkeypatch.setattr(initial_placements, "PATIENCE", 20)
    Portfolio(Problem.from_request(branched), meter=Meter(limit=1e-9)).answer()
    assert len(cuts) < 3
