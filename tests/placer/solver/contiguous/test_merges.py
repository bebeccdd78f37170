"""Nodes that some best placement has together, made one."""

from dataclasses import replace

import pytest
from small_graphs import best_of

from placer.solver.contiguous import ideal_frontiers, ideals
from placer.solver.contiguous.merges import merged
from placer.solver.problem import Problem
from placer.solver.reduce import reduced


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


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("looks", [0, 1, 3])
def test_merging_that_is_cut_short_keeps_it_too(enumerated, looks):
    for problem, nodes, best in enumerated:
        asked = iter(range(looks))
        small = merged(problem, nodes, best, lambda asked=asked: next(asked, None) is None)
        assert best_of(problem, small) == pytest.approx(best, rel=1e-9)
        assert len(merged(problem, nodes, best).nodes) <= len(small.nodes) <= len(nodes.nodes)


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
    many = replace(Problem.from_request(chain([1.0] * 16)), values=(), contiguous=True)
    assert ideals.best_chain(many, reduced(many)) is None


def test_ideals_of_a_front_that_are_too_many_are_left_alone(chain, monkeypatch):
    problem = Problem.from_request(chain([1.0] * 8, devices=3))
    monkeypatch.setattr(ideal_frontiers, "MOST_IDEALS", 2)
    assert ideals.best_chain(problem, reduced(problem)) is None


def test_pairs_of_ideals_that_are_too_many_are_left_alone(chain, monkeypatch):
    problem = Problem.from_request(chain([1.0] * 8, devices=3))
    monkeypatch.setattr(ideals, "MOST_PAIRS", 2)
    assert ideals.best_chain(problem, reduced(problem)) is None


def test_only_chains_within_the_bottleneck_count(enumerated):
    for problem, nodes, _ in enumerated:
        best = ideals.best_chain(problem, nodes)
        if best.devices is None:
            continue
        for share in (1.0, 1.1, 2.0):
            assert ideals.best_chain(problem, nodes, share * best.value).value == pytest.approx(
                best.value, rel=1e-9
            )
        assert ideals.best_chain(problem, nodes, 0.999 * best.value).devices is None


def test_a_layer_goes_with_the_one_that_it_exchanges_most_with(chain):
    # l1 brought to l0 saves both stages the 5 between them, for 2 of work; its value to l2 costs
    # nothing
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
