"""Checkpoints of optimizers whose parameters, or some of them, have no state yet, or none at all in
a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranked_models
import ranked_oddities as models
import ranked_training as training
import torch
from rank_pool import RankPool
from torch import nn

from placer.distributed.state import optimizer_state

CHAIN = {str(index): f"cpu:{index // 2}" for index in range(8)}
PASSED_BY = {"front": "cpu:0", "aside": "cpu:1", "middle": "cpu:0", "back": "cpu:1"}
ELSEWHERE = {"front": "cpu:0", "aside": "cpu:0", "middle": "cpu:1", "back": "cpu:2"}
BARE = {"front": "cpu:0", "middle": "cpu:1", "back": "cpu:2"}
TIED = {"embedding": "cpu:1", "mix": "cpu:0", "head": "cpu:2"}


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused", "adamw+sgd"])
@pytest.mark.parametrize(
    ("make", "places", "others"),
    [
        (models.passed_by, PASSED_BY, ELSEWHERE),
        (models.bare, BARE, {"front": "cpu:0", "middle": "cpu:1", "back": "cpu:1"}),
        (ranked_models.tied_tokens, TIED, {"embedding": "cpu:0", "mix": "cpu:0", "head": "cpu:1"}),
    ],
)
def test_training_goes_on_where_parameters_have_no_state_or_a_process_none(
    ranks: RankPool,
    tmp_path: Path,
    kind: str,
    make: Any,
    places: dict[str, str],
    others: dict[str, str],
) -> None:
    parts = ranks.run(training.resumed, make, places, others, kind, str(tmp_path / "checkpoint"))
    (going_on,) = [found[0] for found in parts if found[0]]
    (from_there,) = [found[1] for found in parts if found[1]]
    assert from_there == pytest.approx(going_on, abs=1e-10)


def test_a_checkpoint_of_another_optimizer_is_told_so(ranks: RankPool, tmp_path: Path) -> None:
    for bare, other in ranks.run(
        training.other_optimizer, ranked_models.chain, CHAIN, str(tmp_path)
    ):
        assert "the checkpoint has nothing of an optimizer for parameter" in bare
        assert (
            "the checkpoint is of another kind of optimizer than this AdamW: "
            "it has 'dampening' and no" in other
        )


def test_a_process_that_cannot_write_its_part_tells_the_others_which_go_on(
    ranks: RankPool, tmp_path: Path
) -> None:
    told = ranks.run(
        training.foreign_parameter, ranked_models.chain, CHAIN, str(tmp_path / "checkpoint")
    )
    assert all(goes_on for _, _, goes_on in told)
    for place, done in enumerate(("write", "read")):
        messages = [found[place] for found in told]
        assert "has a parameter of shape (3,) that is not in this process" in messages.pop(1)
        assert all(
            f"process 1 could not {done} its part of the checkpoint: InputError" in one
            for one in messages
        )


def test_a_process_without_parameters_needs_no_optimizer_for_a_checkpoint(
    ranks: RankPool, tmp_path: Path
) -> None:
    found = ranks.run(
        training.without_an_optimizer, models.bare, BARE, str(tmp_path / "checkpoint")
    )
    assert sorted(one for one in found if one is not None) == [False, False, True]


def test_what_is_saved_reads_the_state_alone() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    gradient = model.weight.grad
    found = optimizer_state.flat(model, optimizer)
    assert found["param_groups.weight.lr"] == 0.1 and not any(
        key.startswith("state.") for key in found
    )
    assert model.weight.grad is gradient
