"""Evaluation of maps, against the solver, the referee, hand-computed loads and brute force."""

from __future__ import annotations

import itertools

import pytest
from evaluated_maps import example

from placer.evaluation.evaluate import evaluated
from placer.solver.check import check
from placer.solver.solve import solve


def every_map(request):
    names = [layer.name for layer in request.profile.layers]
    for choice in itertools.product([device.name for device in request.devices], repeat=len(names)):
        yield dict(zip(names, choice, strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"objective": "latency"},
        {"objective": "memory"},
        {"objective": "step", "schedule": "auto", "chunks": 6},
        {"objective": "step", "schedule": "1f1b", "chunks": 6},
        {"training": False},
        {"transfers": "overlapped"},
    ],
    ids=str,
)
def test_the_best_of_all_valid_maps_is_the_solvers_optimum(changes):
    request = example(**changes)
    values = [
        found.objective_value
        for where in every_map(request)
        if (found := evaluated(request, where)).valid
    ]
    assert min(values) == pytest.approx(solve(request).objective_value)


def test_a_map_is_valid_exactly_if_the_independent_referee_takes_it():
    request = example(
        constraints={"pinned": {"head": "cuda:1"}, "colocated": [["embed", "block.0"]]}
    )
    verdicts, answer = set(), solve(request)
    for where in every_map(request):
        found = evaluated(request, where)
        verdicts.add(found.valid)
        single = found.single_device.objective_value
        placement = answer.model_copy(
            update={
                "layer_devices": where,
                "stages": found.stages,
                # 1F1B: a stage holds a micro-batch for itself and each stage behind it.
                "in_flight": tuple(
                    min(request.chunks, left) for left in range(len(found.stages), 0, -1)
                ),
                "devices": found.devices,
                "objective_value": found.objective_value,
                "speedup": single / found.objective_value,
                "bound": 0.0,
                "gap": 1.0,
                "status": "feasible",
            }
        )
        try:
            check(request, placement)
        except ValueError:
            assert not found.valid
        else:
            assert found.valid
    assert verdicts == {True, False}
