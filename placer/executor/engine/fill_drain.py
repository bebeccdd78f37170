"""Micro-batches through the segments, in the order of fill-drain (GPipe).

    tick        0     1     2     3
    segment 0   m0    m1    m2
    segment 1         m0    m1    m2

Every device works through what was issued to it, so while segment 1 computes micro-batch 0, segment
0 has micro-batch 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.executor.segments import MicroBatch, Segment, taken_in_turn
from placer.executor.stage_errors import Place, raise_explained


def clock(segments: int, chunks: int) -> Iterator[tuple[int, int]]:
    """The order of issue: (segment, micro-batch), tick by tick, the latest segment first within a
    tick.
    """
    for tick in range(segments + chunks - 1):
        for segment in reversed(range(max(0, tick - chunks + 1), min(segments, tick + 1))):
            yield segment, tick - segment


def _order(parts: Sequence[Segment], chunks: int, gathered: bool) -> Iterable[tuple[int, int]]:
    """As ``clock``; one micro-batch after another where segments use what others change."""
    if chunks == 1 or taken_in_turn(parts, gathered) is None:
        return clock(len(parts), chunks)
    return ((segment, chunk) for chunk in range(chunks) for segment in range(len(parts)))


def run(
    pipeline: Sequence[Sequence[Segment]],
    batches: Sequence[MicroBatch],
    gather: Callable[[int], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Run every micro-batch through its segments; all have as many segments.

    Args:
        pipeline: the segments of each micro-batch (a last, smaller one may have been captured
            apart).
        batches: the values of each, which hold the outputs afterwards.
        gather: enters what a segment of this number runs in.

    Raises:
        StageError: a layer failed.
    """
    for segment, chunk in _order(pipeline[0], len(batches), gather is not nullcontext):
        part, batch = pipeline[chunk][segment], batches[chunk]
        try:
            with gather(segment):
                part.run(batch)
        except BaseException as error:
            place = Place(
                chunk, "forward", segment, len(pipeline[0]), part.device, batch.trail.layer
            )
            raise_explained(error, place)


def even_sizes(batch: int, chunks: int) -> list[int]:
    """Return the sizes of micro-batches, which differ by one at most; fewer than ``chunks`` if the
    batch is smaller.

    Args:
        batch: samples in the batch.
        chunks: wanted number of micro-batches.
    """
    chunks = max(1, min(chunks, batch))
    size, larger = divmod(batch, chunks)
    return [size + 1] * larger + [size] * (chunks - larger)


def micro_batch_sizes(batch: int, chunks: int) -> list[int]:
    """The sizes of micro-batches for training: equal but for the last, which may be down to half as
    large.

    A last one that were much smaller would cost a pass of every stage for little work, and one of a
    single sample is more than some layers take (batch normalisation): then there are fewer
    micro-batches.

    Args:
        batch: samples in the batch.
        chunks: how many micro-batches there are to be at most.
    """
    for count in range(min(chunks, batch), 1, -1):
        size = -(-batch // count)
        last = batch - size * (count - 1)
        if last == size or (last > 1 and 2 * last >= size):
            return [size] * (count - 1) + [last]
    return [batch]


def to_device(values: Sequence[Any], device: torch.device) -> list[Any]:
    """Every tensor on one device."""
    return [devices.move(value, device) if isinstance(value, Tensor) else value for value in values]
