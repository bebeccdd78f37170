"""The reported answer: the best of all choices."""

import pytest
from rows import row

from placer.solver import pipelines
from placer.solver.solve import solve


def test_the_answer_says_what_was_looked_at():
    placement = solve(row([1.0] * 4, chunks=4, schedule="auto"))
    step = placement.step
    assert {choice.schedule for choice in step.choices} == {
        "1f1b",
        "zero-bubble",
        "fill-drain",
        "interleaved",
    }
    assert step.samples_per_s == pytest.approx(1e3 * 4 / placement.objective_value)
    busy = 4 * 4 * 3.0
    assert step.bubble == pytest.approx(1 - busy / (2 * placement.objective_value))


@pytest.mark.parametrize("step_ms", [0.0, 5e-324], ids=["no time", "next to no time"])
def test_a_step_without_a_length_has_no_rate(step_ms):
    assert pipelines.samples_per_s(4, step_ms) is None


def test_where_memory_does_for_no_choice_the_one_that_comes_nearest_is_named():
    # Four micro-batches of 10 B a layer: all on one device, or the first of two, 1F1B holds 20 B,
    # fill-drain 40 B.
    why = solve(
        row([1.0] * 2, saved_bytes=10, memory_bytes=15, chunks=4, schedule="auto")
    ).infeasible
    assert why.missing_bytes == 20 - 15
    assert "5 B short; " in why.reason and "4 micro-batches of 1 under '1f1b'" in why.reason


def test_where_there_is_one_choice_none_is_said_to_come_nearest():
    why = solve(
        row([1.0] * 2, devices=1, saved_bytes=10, memory_bytes=15, chunks=4, schedule="1f1b")
    ).infeasible
    assert why.missing_bytes == 5 and "nearest" not in why.reason
