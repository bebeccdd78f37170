"""What one process alone cannot do is told in all of them; what failed half-way is not gone on
with."""

from __future__ import annotations

import pytest
import ranked_models as models
import ranked_training as training
from rank_pool import RankPool

CHAIN = {str(index): f"cpu:{index // 2}" for index in range(8)}


@pytest.mark.parametrize(
    ("at", "error"),
    [
        (
            "arguments",
            "InputError: loss_fn is the class MSELoss; give an instance, such as MSELoss()",
        ),
        ("device", "OutOfMemoryError: no room left"),
        ("memory", "OutOfMemoryError: no room left"),
    ],
)
def test_a_process_that_cannot_build_its_part_tells_the_others(
    ranks: RankPool, at: str, error: str
) -> None:
    told = ranks.run(training.failed_alone, models.chain, CHAIN, at)
    assert told.pop(2) == error
    assert told == [f"InputError: process 2 could not build its part: {error}"] * 3


def test_a_step_may_run_under_another_default_type_than_the_build(ranks: RankPool) -> None:
    assert all(ranks.run(training.default_types, models.tied_row, models.TIED_ROW))


def test_after_a_step_that_failed_nothing_is_taken_for_the_next_one(ranks: RankPool) -> None:
    for same, message in ranks.run(training.after_a_failure, models.tied_row, models.TIED_ROW):
        assert same
        assert "a step of this pipeline failed, and what the processes sent one another" in message


def test_a_process_that_loses_the_others_is_told_where_to_look(ranks: RankPool) -> None:
    for rank, (notes, message) in enumerate(
        ranks.run(training.lost, models.tied_row, models.TIED_ROW)
    ):
        assert notes[0].startswith(
            f"in process {rank} of 4 of a pipeline; where a connection was closed or a time ran"
        )
        assert "a step of this pipeline failed" in message
