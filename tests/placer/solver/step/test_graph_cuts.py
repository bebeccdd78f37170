"""Cuts of graphs with branches, against every map of their layers."""

import itertools

import pytest
from replicas_by_stage import branching_request

from placer.solver import costs
from placer.solver.replicas import stage_ideals
from placer.solver.step import graph_cuts
from placer.solver.step.choices import choice_of, question


def problem_of(seed, schedule):
    request = branching_request(seed)
    return choice_of(question(request, request.profile, 4, schedule, True)).problem


def value_of(problem, devices):
    result = costs.evaluate(problem, devices) if costs.allowed(problem, devices) else None
    return float("inf") if result is None else result.objective_value


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "fill-drain"])
@pytest.mark.parametrize("seed", range(4))
def test_cuts_have_the_best_map_and_bounds_below_their_steps(seed, schedule):
    problem = problem_of(seed, schedule)
    assert graph_cuts.applies(problem)
    found = [(bound, devices) for bound, devices in graph_cuts.cuts(problem, 0.0) if devices]
    bounds = [bound for bound, _ in found]
    values = [value_of(problem, devices) for _, devices in found]
    assert bounds == sorted(bounds)
    assert all(bound <= value for bound, value in zip(bounds, values, strict=True))
    every = itertools.product(range(len(problem.devices)), repeat=len(problem.layers))
    best = min(value_of(problem, list(devices)) for devices in every)
    assert min(values) == pytest.approx(best, rel=1e-12)


def test_it_gives_up_where_it_would_prove_too_little(monkeypatch):
    problem = problem_of(0, "1f1b")
    bound, devices = next(graph_cuts.cuts(problem, 0.0))
    assert devices
    assert list(graph_cuts.cuts(problem, 2 * bound)) == [(bound, [])]
    monkeypatch.setattr(stage_ideals, "MOST_IDEALS", 3)
    assert list(graph_cuts.cuts(problem, 0.0)) == [(0.0, [])]
