"""Chains of ideals where a value goes to each stage that reads it."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from small_graphs import best_of, drawn

from placer.solver import costs
from placer.solver.contiguous import ideal_frontiers, ideals, sends
from placer.solver.cpsat import memory_constraints
from placer.solver.problem import Problem
from placer.solver.reduce import reduced


def in_order(seed):
    """A small problem whose values are read by several, sent to each stage that does, and never
    backwards."""
    problem, random = drawn(seed), Random(seed)
    count = len(problem.layers)
    values = []
    for value in problem.values:
        behind = range(value.source + 1, count)
        readers = tuple(sorted(random.sample(behind, random.randint(1, len(behind)))))
        values.append(replace(value, readers=readers, ordered=True, weightless=True))
    problem = replace(problem, values=tuple(values), multicast=False)
    if memory_constraints.holds_state_alone(problem):
        return problem
    roomy = tuple(device.model_copy(update={"memory_bytes": 1_000}) for device in problem.devices)
    return replace(problem, devices=roomy)


@pytest.fixture(scope="module")
def sent():
    """Problems with values of several readers, their nodes and their best bottlenecks by
    enumeration."""
    problems = [problem for seed in range(200) if sends.applies(problem := in_order(seed))]
    found = [(problem, nodes := reduced(problem), best_of(problem, nodes)) for problem in problems]
    return [(problem, nodes, best) for problem, nodes, best in found if best is not None]


def test_the_best_chain_is_the_optimum_where_each_stage_that_reads_a_value_is_sent_it(sent):
    for problem, nodes, best in sent:
        chain = ideals.best_chain(problem, nodes, best * (1 + 1e-9))
        assert chain.bound == pytest.approx(best, rel=1e-8, abs=1e-12)
        assert costs.judged(problem, chain.devices).objective_value == pytest.approx(best)
    assert len(sent) > 50


def test_values_that_count_once_prove_less(sent, monkeypatch):
    monkeypatch.setattr(ideals, "sends_apply", lambda problem: False)
    less = sum(
        ideals.best_chain(problem, nodes, best).bound < best * (1 - 1e-6)
        for problem, nodes, best in sent
    )
    assert less > 5


def test_no_chain_is_within_less_than_the_optimum(sent):
    for problem, nodes, best in sent:
        if best > 0:
            chain = ideals.best_chain(problem, nodes, best * (1 - 1e-6))
            assert chain.devices is None and chain.bound == float("inf")


def read_by_all(chain, stages=3):
    """A chain whose first layer is read by all others as well."""
    problem = Problem.from_request(chain([2.0] * stages, devices=stages, value_bytes=0))
    first, *others = problem.values
    return replace(
        problem, values=(replace(first, readers=tuple(range(1, stages)), bytes=1), *others)
    )


def test_a_source_pays_for_every_stage_that_reads(chain):
    # apart: 2 + 1 for each of two stages that read; together with l1: 4 + 1
    problem = read_by_all(chain)
    found = ideals.best_chain(problem, reduced(problem))
    assert found.value == pytest.approx(4.0) and len(set(found.devices)) == 3
    assert costs.judged(problem, found.devices).load_ms[found.devices[0]] == 4.0


def test_labels_that_are_too_many_leave_the_bound_of_values_that_count_once(chain, monkeypatch):
    problem = read_by_all(chain)
    monkeypatch.setattr(sends, "MOST_TIMES", 0)
    assert ideals.best_chain(problem, reduced(problem)).value == pytest.approx(3.0)


def test_a_product_in_parts_is_that_of_the_whole():
    random = np.random.default_rng(0)
    for rows, inner, columns in (
        (1, 1, 1),
        (3, 70, 5),
        (90, 40, 200),
        (500, 300, 1),
        (2, 300_000, 3),
        (0, 5, 9),
    ):
        left, right = (
            random.integers(9, size=(rows, inner)),
            random.integers(9, size=(inner, columns)),
        )
        assert (
            ideal_frontiers.product(left.astype(float), right.astype(float)) == left @ right
        ).all()
