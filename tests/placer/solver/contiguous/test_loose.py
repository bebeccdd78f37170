"""Nodes that nothing orders: a bound without their place, and their place afterwards."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from small_graphs import best_of, drawn

from placer.solver import costs
from placer.solver.contiguous import ideals
from placer.solver.contiguous.loose import LooseModel, _patterns, loose_nodes
from placer.solver.cpsat.runner import Limits
from placer.solver.problem import Problem
from placer.solver.reduce import reduced
from placer.solver.solve import Portfolio


def loosened(seed):
    """A small problem; values of some layers order nothing."""
    problem, random = drawn(seed), Random(seed)
    free = set(random.sample(range(len(problem.layers)), 2))
    values = [
        replace(v, ordered=v.ordered and not free.intersection((v.source, *v.readers)))
        for v in problem.values
    ]
    return replace(problem, values=tuple(values))


@pytest.fixture(scope="module")
def some_loose():
    """Problems with loose nodes, their nodes and their best bottlenecks by enumeration."""
    reductions = [(problem, reduced(problem)) for problem in map(loosened, range(140))]
    found = [
        (problem, nodes, best_of(problem, nodes))
        for problem, nodes in reductions
        if loose_nodes(problem, nodes)
    ]
    return [(problem, nodes, best) for problem, nodes, best in found if best is not None]


def test_what_stages_count_of_loose_nodes_is_never_too_much(some_loose):
    for problem, nodes, best in some_loose:
        loose = loose_nodes(problem, nodes)
        for some in (loose, loose[:1]):
            chain = ideals.best_chain(problem, nodes, best * (1 + 1e-9), loose=some)
            assert chain.devices is not None and chain.bound <= best * (1 + 1e-9)
    assert len(some_loose) > 70


def test_what_stages_count_of_loose_nodes_is_mostly_all(some_loose):
    exact = sum(
        ideals.best_chain(
            problem, nodes, best * (1 + 1e-9), loose=loose_nodes(problem, nodes)[:1]
        ).bound
        >= best * (1 - 1e-6)
        for problem, nodes, best in some_loose
    )
    assert exact > len(some_loose) / 2


def test_loose_nodes_are_placed_at_best_where_the_others_stay(some_loose):
    placed = 0
    for problem, nodes, best in some_loose:
        loose = loose_nodes(problem, nodes)
        chain = ideals.best_chain(problem, nodes, best * (1 + 1e-9), loose=loose)
        devices = (
            LooseModel(problem, nodes, 3 * best + 1, chain.devices, loose)
            .solve(Limits(20.0))
            .devices
        )
        result = None if devices is None else costs.judged(problem, devices)
        placed += result is not None and result.objective_value <= best * (1 + 1e-6)
    assert placed > len(some_loose) / 2


def loose_end(chain, memory_bytes):
    """l0 to l2 in a row on two devices, and l3, which orders nothing: it reads l0 for 6 ms, works 1
    ms and holds 3."""
    asked = chain(
        [8.0, 4.0, 4.0, 1.0],
        devices=2,
        memory_bytes=memory_bytes,
        param_bytes=[1, 1, 1, 3],
        value_bytes=0,
    )
    problem = Problem.from_request(asked)
    one, two, _ = (replace(value, weightless=True) for value in problem.values)
    return replace(problem, values=(one, two, replace(one, readers=(3,), bytes=6, ordered=False)))


def test_a_stage_pays_for_a_loose_node_or_for_its_transfers(chain):
    problem = loose_end(chain, 100)
    nodes = reduced(problem)
    # l0 l3 | l1 l2; apart: 8 + 6
    assert ideals.best_chain(problem, nodes, loose=[3]).value == pytest.approx(9.0)
    alone = ideals.best_chain(replace(problem, most_devices=1), nodes, loose=[3])
    assert alone.value == pytest.approx(17.0)


def test_a_stage_has_room_for_few_loose_nodes(chain):
    roomy, tight = loose_end(chain, 4), loose_end(chain, 3)
    assert ideals.best_chain(roomy, reduced(roomy), loose=[3]).value == pytest.approx(9.0)
    # l0 leaves room for 2 of the 3 bytes of l3, each of which saves 5 / 3 of the 6 ms
    assert ideals.best_chain(tight, reduced(tight), loose=[3]).value == pytest.approx(
        8 + 6 - 2 * 5 / 3, rel=1e-2
    )
    # l0 l1 l2 | l3: no less than that
    assert best_of(tight, reduced(tight)) == pytest.approx(22.0)


def test_ideals_are_told_apart_by_what_they_hold_of_many_nets():
    random = np.random.default_rng(0)
    for nets in (1, 5, 100):
        held = random.integers(3, size=(50, nets)).astype(np.float32)
        number, patterns = _patterns(held)
        assert (patterns[number] == held).all()
        assert len(patterns) == len({tuple(row) for row in held.tolist()})


def test_a_problem_whose_ideals_are_few_but_for_loose_nodes_is_solved_without_integer_programs(
    chain,
):
    count = 20
    problem = Problem.from_request(chain([3.0] * 6 + [1.0] * count, devices=3))
    row, first = (
        problem.values[:5],
        replace(problem.values[0], bytes=2, ordered=False, weightless=True),
    )
    ends = tuple(replace(first, source=index % 6, readers=(6 + index,)) for index in range(count))
    problem = replace(problem, values=(*row, *ends), contiguous=True)
    assert ideals.too_loose(problem, reduced(problem))
    placement = Portfolio(problem).answer()
    assert placement.status == "optimal"
    assert placement.objective_value == pytest.approx(14.0)
