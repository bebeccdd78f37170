"""Published graphs, against optima of two other methods (a DP over ideals, and CP-SAT)."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from placer.solver.free import column_generation
from placer.solver.reduce import reduced
from placer.solver.solve import Portfolio

SOURCE = Path(__file__).parents[3] / "benchmarks" / "solver" / "neurips20.py"


@pytest.fixture(scope="module")
def neurips20():
    spec = importlib.util.spec_from_file_location("neurips20", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name",
    [
        "layer_bert24_inference",
        "layer_bert24_training",
        "layer_gnmt_inference",
        "layer_gnmt_training",
        "layer_resnet50_inference",
        "operator_bert3_inference",
        # an earlier presolve of CP-SAT proved 263.04 here
        "operator_resnet50_training",
    ],
)
def test_the_known_optimum_is_found_and_proven(neurips20, name):
    given = neurips20.load(name)
    placement = Portfolio(neurips20.problem(given, time_limit_s=100)).answer()
    assert placement.status == "optimal"
    assert neurips20.bottleneck(given, placement.layer_devices) == pytest.approx(
        neurips20.OPTIMA[name], rel=2e-6
    )


def test_ideals_that_are_too_many_are_asked_for_again_a_little_below(neurips20):
    # At 46.68 ms they are too many, at 45.84 there is none, and 46.26 is within a hundredth of the
    # first.
    name = "layer_inceptionv3_training"
    given = neurips20.on_16(neurips20.load(name))
    placement = Portfolio(neurips20.problem(given, time_limit_s=100)).answer()
    assert (placement.status, placement.method) == ("optimal", "ideals")
    assert placement.objective_value == pytest.approx(neurips20.OPTIMA_ON_16[name], rel=2e-6)


@pytest.mark.exhaustive
def test_prices_that_a_known_set_is_worth_too_much_by_do_not_end_the_search_for_a_bound(neurips20):
    # Without sets that fit in its box the covering program has no end; taken for a yes, that
    # stopped at 238.1 ms.
    name = "operator_resnet50_training"
    problem = replace(neurips20.problem(neurips20.load(name), time_limit_s=100), contiguous=False)
    known, done = neurips20.BEST_WHEN_FREE[name], []
    found = column_generation.share_bound(
        problem,
        reduced(problem, known),
        known,
        220.847,
        lambda work: done.append(work) or sum(done) > 9,
    )
    assert 250.0 < found <= known


@pytest.mark.exhaustive
def test_of_25_heavy_nodes_one_of_six_devices_holds_five_and_what_is_between_them(neurips20):
    # Placements of 373.424072 ms are known; fractions of sets, in a minute, proved 356.13 and no
    # more. Integer prices count the nodes.
    name = "operator_bert12_training"
    problem = replace(neurips20.problem(neurips20.load(name), time_limit_s=100), contiguous=False)
    known, done = 373.424072, []
    found = column_generation.share_bound(
        problem,
        reduced(problem, known),
        known,
        0.0,
        lambda work: done.append(work) or sum(done) > 9,
    )
    assert 373.4240 < found <= known
