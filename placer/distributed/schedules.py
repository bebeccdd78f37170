"""The schedule classes of torch.distributed.pipelining for Placer's schedules.

    schedule      one stage per device            several stages per device
    fill-drain    ScheduleGPipe                   ScheduleLoopedBFS
    1f1b          Schedule1F1B                    ScheduleInterleaved1F1B
    interleaved   -                               ScheduleInterleaved1F1B
    zero-bubble   ScheduleInterleavedZeroBubble   ScheduleInterleavedZeroBubble

The library assigns stage ``i`` to process ``i % processes``. If the devices of the line have
another order than the processes, the stages are given the actual mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from placer.capture.argument_checks import require_chunks
from placer.errors import InputError

SCHEDULES = ("fill-drain", "1f1b", "interleaved", "zero-bubble")

LibrarySchedule = PipelineScheduleSingle | PipelineScheduleMulti


def splits(schedule: str) -> bool:
    """Return whether weight gradients have a pass of their own."""
    return schedule == "zero-bubble"


def make(
    schedule: str,
    stages: Sequence[PipelineStage],
    ranks: Sequence[int],
    position: int,
    chunks: int,
    loss: Callable[..., Tensor] | None,
) -> LibrarySchedule:
    """Return the library's schedule of this process's stages.

    Args:
        schedule: one of ``SCHEDULES``.
        stages: of this process, in order.
        ranks: the group rank of each device in the line.
        position: of this process's device in the line.
        chunks: micro-batches in a batch.
        loss: a function from the last stage's output and a target to the micro-batch's share of the
            loss; None for inference.

    Raises:
        InputError: if the schedule does not support this number of micro-batches.
    """
    check(schedule, chunks, len(ranks), len(stages))
    many = len(stages) > 1 or (splits(schedule) and loss is not None)
    library: Any = (
        _several(schedule, loss is not None) if many else _single(schedule, chunks, len(ranks))
    )
    made = library(
        list(stages) if many else stages[0], n_microbatches=chunks, loss_fn=loss, scale_grads=False
    )
    where = {index: ranks[index % len(ranks)] for index in range(stages[0].num_stages)}
    for stage in stages:
        stage.stage_index_to_group_rank = where
    if many:
        made.rank = position  # selects this process's row of the schedule
    result: LibrarySchedule = made
    return result


def check(schedule: str, chunks: int, devices: int, rounds: int) -> None:
    """Raise an InputError for an unknown schedule or an unsupported number of micro-batches.

    Args:
        schedule: its name.
        chunks: micro-batches in a batch.
        devices: number of devices in the line.
        rounds: stages on each device.
    """
    if schedule not in SCHEDULES:
        raise InputError(f"schedule {schedule!r} is not known; give one of {', '.join(SCHEDULES)}")
    require_chunks(chunks)
    if schedule == "interleaved" and rounds == 1:
        raise InputError(
            "schedule 'interleaved' needs several stages on a device, and each has one; give '1f1b'"
        )
    interleaved = splits(schedule) or (schedule != "fill-drain" and rounds > 1)
    # the library requires equally large rounds of micro-batches
    turns = max(1, chunks // devices)
    if interleaved and chunks % turns:
        fitting = [
            count
            for count in range(1, 2 * chunks + devices)
            if count % max(1, count // devices) == 0
        ]
        below, above = max(c for c in fitting if c < chunks), min(c for c in fitting if c > chunks)
        raise InputError(
            f"schedule {schedule!r} on {devices} devices cannot have {chunks} micro-batches; "
            f"give chunks={below} or chunks={above}"
        )


def _single(schedule: str, chunks: int, devices: int) -> type[PipelineScheduleSingle]:
    # With fewer micro-batches than stages, 1F1B equals fill-drain, and the library rejects it.
    return Schedule1F1B if schedule == "1f1b" and chunks >= devices else ScheduleGPipe


def _several(schedule: str, training: bool) -> type[PipelineScheduleMulti]:
    if not training or schedule == "fill-drain":
        return ScheduleLoopedBFS
    return ScheduleInterleavedZeroBubble if splits(schedule) else ScheduleInterleaved1F1B
