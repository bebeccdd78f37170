"""The transfers between the stages of a training pipeline, and their times on these devices.

    stage 0 ── values, gradients back ──▶ stage 1 ──▶ stage 2
    └───────────── a skip connection ─────────────────┘

All values from one stage to another are one transfer, and so are their gradients.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from placer import devices
from placer.executor.training.stages.training_slot import TrainingSlot
from placer.executor.training.stages.training_stage import TrainingStage
from placer.schedule import Transfer

Copies = Sequence[tuple[Tensor, Tensor]]
"""Pairs of a source and a target."""

REPEATS = 3
"""Timed copies; the median counts."""


def crossings(
    stages: Sequence[TrainingStage], segment_of: Sequence[int] | None = None
) -> list[Transfer]:
    """Return the transfers between stages of different devices, if their passes are timed too.

    Args:
        stages: all, with slots; the contents of the first slot of each are overwritten.
        segment_of: by stage, the segment that it is a piece of; None if each is a segment.
    """
    if any(not stage.is_recorded for stage in stages):
        return []
    transfers = found(stages, _copy_ms)
    return transfers if segment_of is None else _between_segments(transfers, segment_of)


def _between_segments(transfers: Sequence[Transfer], segment_of: Sequence[int]) -> list[Transfer]:
    """Return one transfer for all those from pieces of one segment to pieces of another."""
    sums: dict[tuple[int, int], tuple[float, float | None]] = {}
    for one in transfers:
        key = segment_of[one.source], segment_of[one.target]
        forward_ms, gradient_ms = sums.get(key, (0.0, None))
        if one.gradient_ms is not None:
            gradient_ms = (gradient_ms or 0.0) + one.gradient_ms
        sums[key] = forward_ms + one.forward_ms, gradient_ms
    return [Transfer(*key, *times) for key, times in sums.items()]


def found(stages: Sequence[TrainingStage], clock: Callable[[Copies], float]) -> list[Transfer]:
    """Return the transfers, timed by ``clock``, which is given all copies of one moment."""
    maker = {name: index for index, stage in enumerate(stages) for name in stage.writes}
    transfers = []
    for target, stage in enumerate(stages):
        slot = stage.slots[0]
        for source in sorted({maker[name] for name in stage.reads if name in maker}):
            if stages[source].device == stage.device:
                continue
            names = [name for name in stage.reads if maker.get(name) == source]
            values, gradients = (
                _values(names, stages[source].slots[0], slot),
                _gradients(names, target, stages, source),
            )
            if values:
                transfers.append(
                    Transfer(source, target, clock(values), clock(gradients) if gradients else None)
                )
    return transfers


def _values(names: Sequence[str], made: TrainingSlot, read: TrainingSlot) -> Copies:
    pairs = [(made.outputs[name], read.inputs[name]) for name in names]
    return [(source, target) for source, target in pairs if isinstance(target, Tensor)]


def _gradients(
    names: Sequence[str], reader: int, stages: Sequence[TrainingStage], maker: int
) -> Copies:
    sent, summed = stages[reader].slots[0].input_gradients, stages[maker].slots[0].gradients
    return [
        (sent[name], summed[name])
        for name in names
        if reader in stages[maker].awaited.get(name, ())
    ]


@torch.no_grad()
def _copy_ms(copies: Copies) -> float:
    """Return the median time of a few copies behind a queue that is full."""

    def run() -> None:
        for source, target in copies:
            devices.fill(target, source)

    return statistics.median(devices.queued_ms([run], devices.location(copies[0][1]), REPEATS)[0])
