"""Batches with other layouts and losses over two processes: as the unsplit model's, or refused in
all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import ranked
import ranked_batches as batches
import torch
from rank_pool import RankPool

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
RIGHT = [
    batches.sequence_first,
    batches.sequence_first_and_batch_targets,
    batches.sum_declared,
    batches.constant_declared,
    batches.weighed,
]


@pytest.mark.covering
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("make", RIGHT)
def test_losses_and_gradients_are_those_of_the_whole_batch(
    make: Callable[[], batches.Case], schedule: str, ranks: RankPool
) -> None:
    loss, gradients = batches.unsplit_step(make)
    parts = [part for part in ranks.run(batches.step, make, schedule) if part]
    assert [part["error"] for part in parts] == ["", ""]
    losses = [loss for part in parts for loss in part["losses"]]
    assert losses == pytest.approx([loss, loss], rel=1e-10)
    torch.testing.assert_close(ranked.joined(parts, "gradients"), gradients, **TOLERANCE)


@pytest.mark.parametrize("make", [batches.sequence_first])
def test_results_are_joined_along_the_declared_dimension(
    make: Callable[[], batches.Case], ranks: RankPool
) -> None:
    torch.manual_seed(0)
    case = make()
    (result,) = [found for found in ranks.run(batches.forward, make) if found is not None]
    with torch.no_grad():
        torch.testing.assert_close(result, case.model.eval()(case.inputs), **TOLERANCE)


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (batches.sum_undeclared, "reduction='sum'"),
        (batches.weighed_undeclared, "weigh="),
        (batches.contrastive, "chunks=1"),
        (batches.sequence_first_undeclared, "chunks=1"),
        (batches.absent_input, "names 'unknown', which is not an input (inputs: x)"),
        (batches.absent_dimension, "dimension 5 is the batch, and no tensor has that many"),
        (batches.absent_output, "names 'unknown', which is neither in the model's result"),
    ],
)
def test_what_is_not_declared_is_refused_in_every_process(
    make: Callable[[], batches.Case], fix: str, ranks: RankPool
) -> None:
    parts = [part for part in ranks.run(batches.step, make, "1f1b") if part]
    assert len(parts) == 2 and all(part["losses"] == [] for part in parts)
    told = [part["error"] for part in parts]
    kind = "InputError" if "absent" in make.__name__ else "BatchError"
    assert sum(error.startswith(kind) for error in told) >= 1 and all(told)
    assert any(fix in error for error in told), told


def test_a_later_batch_with_unequal_numbers_of_labels_is_compared_where_the_target_is(
    ranks: RankPool,
) -> None:
    """The first batch, of which each micro-batch has one label, says nothing about it."""
    make = batches.weighed_undeclared
    first, last = (
        part for part in ranks.run(batches.step_with_other_labels, make, [1, -100, 2, -100]) if part
    )
    assert not first["error"] and len(last["losses"]) == 1
    assert last["error"].startswith("BatchError: the loss of a batch") and "weigh=" in last["error"]


def test_a_later_batch_with_declared_weights_is_that_of_the_whole_batch(ranks: RankPool) -> None:
    loss, _ = batches.unsplit_step(batches.weighed)
    parts = ranks.run(batches.step_with_other_labels, batches.weighed, [1, -100, 2, -100])
    (losses,) = [part["losses"] for part in parts if part and part["losses"]]
    assert losses[1] == pytest.approx(loss, rel=1e-10)
