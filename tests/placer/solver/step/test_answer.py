"""What is told of the best of all choices."""

import pytest
from rows import row

from placer.solver.solve import solve


def test_the_answer_says_what_was_looked_at():
    placement = solve(row([1.0] * 4, chunks=4, schedule="auto"))
    step = placement.step
    assert {choice.schedule for choice in step.choices} == {"1f1b", "zero-bubble", "fill-drain", "interleaved"}
    assert step.samples_per_s == pytest.approx(1e3 * 4 / placement.objective_value)
    busy = 4 * 4 * 3.0
    assert step.bubble == pytest.approx(1 - busy / (2 * placement.objective_value))
