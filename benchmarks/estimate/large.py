"""The GPT of 10 billion parameters of the executor's benchmark, in training on several devices.

The record has the memory of the fullest device, but no split. The split was the fastest one, and
all blocks take equal time. So layers get times in proportion to the products of their weights here,
and among the splits with the shortest bottleneck, the one with the smallest fullest device counts.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import product
from typing import Any

import torch

from placer import Constraints, PlacementRequest, Profile, solve, zoo
from placer.estimator.fake_profile import estimated_profile
from placer.schema import Cluster, Device, Link, ProfileOptions

from .. import record
from ..profiler.cases import token_loss

RESULTS = "executor-4xH200"
FULLEST = "memory of the fullest device"
BLOCKS, WIDTH, HEADS, CONTEXT, VOCABULARY = 30, 5120, 40, 1024, 50304
SAMPLES = 2
"""Of a micro-batch. A batch had twice as many micro-batches as there were devices."""
TARGET_PERCENT = 5.0
LABEL = "large, GPT of 9.96 billion parameters"
_KIND = "NVIDIA H200"


def rows() -> list[dict[str, Any]]:
    """Return a row for each number of devices."""
    return [_row(count) for count in (2, 4)]


def _row(count: int) -> dict[str, Any]:
    label = f"{LABEL}, Adam, float32, {count} devices"
    measured = next(
        row["value"]
        for row in record.read(RESULTS)["rows"]
        if (row["case"], row["measure"]) == (label, FULLEST)
    )
    found = _profile(count)
    fullest = {split: _fullest_gib(found, split) for split in _fastest(count)}
    split = min(fullest, key=fullest.__getitem__)
    error = float(f"{100 * (fullest[split] / measured - 1):.4g}")
    return record.row(
        label,
        f"{FULLEST}, error of the estimate",
        "%",
        error,
        target=TARGET_PERCENT,
        met=abs(error) <= TARGET_PERCENT,
        figures={
            "measured GiB": measured,
            "estimated GiB": float(f"{fullest[split]:.4g}"),
            "blocks": " + ".join(map(str, split)),
        },
    )


def _profile(count: int) -> Profile:
    with torch.device("meta"):
        model = zoo.gpt(BLOCKS, WIDTH, HEADS, CONTEXT, VOCABULARY)
    tokens = torch.zeros(SAMPLES, CONTEXT, dtype=torch.long)
    options = ProfileOptions(
        # fused, as it ran: it makes no copies of the weights
        optimizer=partial(torch.optim.Adam, fused=True),
        granularity="blocks",
        loss_fn=token_loss,
        target=tokens,
    )
    return estimated_profile(model, tokens, _cluster(count), options)


def _cluster(count: int) -> Cluster:
    names = [f"cuda:{index}" for index in range(count)]
    return Cluster(
        devices=tuple(
            Device(name=name, type=_KIND, memory_bytes=141 * 10**9, host="gpus") for name in names
        ),
        links=tuple(
            Link(source=a, target=b, bandwidth_bytes_per_s=3e11)
            for a, b in product(names, names)
            if a != b
        ),
    )


def _fastest(count: int) -> list[tuple[int, ...]]:
    """Return the splits of the blocks into stages with the shortest bottleneck.

    The head after the last block takes as long as its products: V / (12 d) of a block's.
    """
    head = VOCABULARY / (12 * WIDTH)
    splits = [
        (*first, BLOCKS - sum(first))
        for first in product(range(1, BLOCKS), repeat=count - 1)
        if sum(first) < BLOCKS
    ]
    slowest = {split: max(*split[:-1], split[-1] + head) for split in splits}
    shortest = min(slowest.values())
    return [split for split in splits if slowest[split] == shortest]


def _fullest_gib(found: Profile, split: tuple[int, ...]) -> float:
    """Return the memory of the fullest device under 1F1B."""
    ends = [sum(split[: stage + 1]) for stage in range(len(split))]
    pinned = {}
    for index, layer in enumerate(found.layers):
        number = re.search(r"\d+", layer.name)
        block = int(number.group()) if number else (0 if index < BLOCKS else BLOCKS - 1)
        stage = next(stage for stage, end in enumerate(ends) if block < end)
        pinned[layer.name] = f"cuda:{stage}"
    placement = solve(
        PlacementRequest(
            profile=found,
            objective="memory",
            chunks=2 * len(split),
            schedule="1f1b",
            constraints=Constraints(contiguous=True, pinned=pinned),
        )
    )
    return max(load.memory.total_bytes for load in placement.devices) / 2**30
