"""Placements that contradict themselves."""

from __future__ import annotations

from typing import Any

import pytest

from placer.errors import InputError
from placer.schema import Placement


def placement(*members: tuple[str, int], batch_size: int = 8) -> dict[str, Any]:
    """Return the JSON of a placement whose only stage several devices hold."""
    return {
        "status": "feasible",
        "objective": "step",
        "layer_devices": {"a": "cuda:0"},
        "replicas": {"cuda:0": [{"device": name, "samples": number} for name, number in members]},
        "batch_size": batch_size,
    }


def test_shares_of_different_sizes_are_accepted() -> None:
    shared = Placement.model_validate(placement(("cuda:0", 3), ("cuda:1", 5)))
    assert [one.samples for one in shared.replicas["cuda:0"]] == [3, 5]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            [("cuda:0", 4), ("cuda:1", 2)],
            "replicas: the replicas of 'cuda:0' compute 6 samples of each micro-batch, but "
            "batch_size is 8; give shares that add up to batch_size",
        ),
        (
            [("cuda:0", 8)],
            "replicas: 'cuda:0' lists 1 replica; list all devices that hold its layers, itself "
            "included, or leave it out",
        ),
        ([], "replicas: 'cuda:0' lists 0 replicas"),
        (
            [("cuda:1", 4), ("cuda:0", 4)],
            "replicas: the first replica of 'cuda:0' is 'cuda:1'; list 'cuda:0' itself first",
        ),
        (
            [("cuda:0", 4), ("cuda:0", 4)],
            "replicas: of the replicas of 'cuda:0', device 'cuda:0' is listed twice",
        ),
    ],
)
def test_replicas_that_do_not_share_whole_micro_batches_are_refused(
    members: list[tuple[str, int]], message: str
) -> None:
    with pytest.raises(InputError) as refused:
        Placement.model_validate(placement(*members))
    assert message in str(refused.value)
