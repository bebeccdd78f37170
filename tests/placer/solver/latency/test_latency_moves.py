"""Local search for a small latency."""

import pytest

from placer.schema import Constraints
from placer.solver import costs
from placer.solver.cpsat.runner import PER_WORK
from placer.solver.latency import latency_moves
from placer.solver.latency.latency_moves import Quotient
from placer.solver.reduce import reduced

FREE, CONTIGUOUS = Constraints(contiguous=False), Constraints(contiguous=True)


def last(problem, start, over=lambda work: False):
    *_, found = [start, *latency_moves.improved(problem, reduced(problem), start, over, patience=2)]
    return found


@pytest.mark.parametrize("rules", [FREE, CONTIGUOUS])
@pytest.mark.parametrize("training", [False, True])
def test_rows_on_one_device_are_shared_out(rows, rules, training):
    problem = rows([[1.0] * 3] * 4, devices=4, training=training, constraints=rules)
    found = costs.judged(problem, last(problem, [0] * 12))
    assert found.objective_value == (9.0 if training else 3.0)


def test_what_fits_with_the_micro_batches_of_its_stage_in_flight_is_a_start(rows):
    """One stage has one of eight in flight; with all of them it would take 972 bytes."""
    asked = {"schedule": "1f1b", "chunks": 8, "constraints": CONTIGUOUS}
    problem = rows(
        [[1.0] * 3] * 4, devices=4, training=True, saved_bytes=10, memory_bytes=500, **asked
    )
    assert costs.judged(problem, [0] * 12) is not None
    assert costs.judged(problem, last(problem, [0] * 12)).objective_value == 9.0


def test_a_search_that_is_over_has_nothing_better(rows):
    problem = rows([[1.0] * 3] * 4, devices=4, constraints=FREE)
    assert last(problem, [0] * 12, over=lambda work: True) == [0] * 12


def test_work_is_told_as_it_is_done(rows):
    told = []
    problem = rows([[1.0] * 10] * 4, devices=4, constraints=FREE)
    last(problem, [0] * 40, over=lambda work: bool(told.append(work)) or len(told) == 5)
    assert told == [latency_moves.ROUND.layers_per_look / PER_WORK.layers] * 5


def test_devices_that_wait_for_each_other_are_seen(rows):
    problem = rows([[1.0] * 3], devices=3, constraints=CONTIGUOUS)
    quotient = Quotient(problem, reduced(problem), [0, 0, 0])
    quotient.move(1, 2)
    assert not quotient.is_acyclic()
    quotient.move(2, 1)
    assert quotient.is_acyclic()
