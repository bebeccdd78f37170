"""Eager calls: micro-batches through the segments in the order of fill-drain (GPipe).

    tick        0     1     2     3
    segment 0   m0    m1    m2
    segment 1         m0    m1    m2

Every device works through what was issued to it, so while segment 1 computes micro-batch 0, segment
0 has micro-batch 1. Nothing is recorded here, and autograd may follow the values: their copies
between devices are operations of the passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.capture.pytrees import flatten
from placer.devices import Courier
from placer.executor.engine.engine import Engine
from placer.executor.engine.slot import Slot
from placer.executor.engine.stage import Stage
from placer.executor.segments import MicroBatch, Segment, taken_in_turn
from placer.executor.stage_errors import Trail
from placer.schedule import Pass, plan


def run(
    pipeline: Sequence[Sequence[Segment]],
    batches: Sequence[MicroBatch],
    gather: Callable[[int], AbstractContextManager[Any]] = nullcontext,
    by_layer: bool = False,
) -> None:
    """Run every micro-batch through its segments; all have as many segments.

    Args:
        pipeline: the segments of each micro-batch (a last, smaller one may have been captured
            apart). Pipelines may share devices.
        batches: the values of each, which hold the outputs afterwards.
        gather: returns the context in which a segment of this number runs.
        by_layer: whether each layer whose parameters rest runs for all micro-batches before the
            next one, so that its parameters are copied once; see ``may_run_by_layer``.

    Raises:
        StageError: a layer failed.
    """
    if by_layer:
        pieces = [piece for part in pipeline[0] for piece in part.resting_apart()]
        pipeline = [pieces] * len(batches)
    # One trail for all: passes are issued by one thread, so the last layer entered is the one that
    # fails.
    trail = Trail()
    for batch in batches:
        batch.trail = trail
    courier = Courier()
    # Micro-batches of one pipeline share an engine; its segments' devices tell which one it is.
    engines: dict[tuple[torch.device, ...], Engine[Stage[Slot]]] = {}
    turns: Counter[tuple[torch.device, ...]] = Counter()
    seats = []
    for parts, batch in zip(pipeline, batches, strict=True):
        places = tuple(segment.device for segment in parts)
        if places not in engines:
            # Nothing is sent between these stages: a MicroBatch moves its values to the device that
            # reads them, and autograd moves the gradients back.
            stages = [Stage[Slot](segment, (), {}, trail) for segment in parts]
            engines[places] = Engine(stages, lanes={}, courier=courier)
        for index, stage in enumerate(engines[places].stages):
            work = partial(_compute, parts[index], batch, partial(gather, index))
            stage.slots.append(Slot(passes={"forward": work}))
        seats.append((engines[places], turns[places]))
        turns[places] += 1
    for item in _order(pipeline[0], len(batches), gather is not nullcontext, by_layer):
        engine, turn = seats[item.micro_batch]
        engine.issue(item, turn)


def _compute(
    segment: Segment, batch: MicroBatch, gather: Callable[[], AbstractContextManager[Any]]
) -> None:
    with gather():
        segment.run(batch)


def may_run_by_layer(pipeline: Sequence[Sequence[Segment]]) -> bool:
    """Return whether several micro-batches may share the copies of parameters that rest.

    Args:
        pipeline: the segments of each micro-batch. All need the same, and no state that one layer
            changes and another one uses.
    """
    first = pipeline[0]
    return (
        len(pipeline) > 1
        and all(parts is first for parts in pipeline)
        and any(step.resting for part in first for step in part.steps)
        and taken_in_turn([piece for part in first for piece in part.resting_apart()]) is None
    )


def _order(parts: Sequence[Segment], chunks: int, gathered: bool, by_layer: bool) -> Iterable[Pass]:
    """Return the passes in the order of fill-drain, or micro-batch after micro-batch.

    The latter where a segment changes state that another one uses: it must not find there what a
    later micro-batch left. By layer, segment after segment.
    """
    if by_layer:
        return [Pass(stage, "forward", one) for stage in range(len(parts)) for one in range(chunks)]
    if parts and chunks > 1 and taken_in_turn(parts, gathered) is None:
        return plan("fill-drain", range(len(parts)), chunks, training=False).issue
    stages = range(len(parts))
    return [Pass(stage, "forward", chunk) for chunk in range(chunks) for stage in stages]


def even_sizes(batch: int, chunks: int) -> list[int]:
    """Return the sizes of micro-batches, which differ by one at most.

    Args:
        batch: samples in the batch.
        chunks: wanted number of micro-batches; there are fewer if the batch has fewer samples.
    """
    chunks = max(1, min(chunks, batch))
    size, larger = divmod(batch, chunks)
    return [size + 1] * larger + [size] * (chunks - larger)


def micro_batch_sizes(batch: int, chunks: int) -> list[int]:
    """Return the sizes of micro-batches for training: equal, but the last may be half as large.

    A smaller last micro-batch would cost a pass of every stage for little work. A single sample is
    too few for some layers (batch normalisation). Then there are fewer micro-batches.

    Args:
        batch: samples in the batch.
        chunks: the largest number of micro-batches.
    """
    for count in range(min(chunks, batch), 1, -1):
        size = -(-batch // count)
        last = batch - size * (count - 1)
        if last == size or (last > 1 and 2 * last >= size):
            return [size] * (count - 1) + [last]
    return [batch]


def to_device(values: Sequence[Any], device: torch.device) -> list[Any]:
    """Return the values with every tensor on one device."""
    return [devices.move(value, device) if isinstance(value, Tensor) else value for value in values]


def to_device_nest(nest: Any, device: torch.device) -> Any:
    """Return a nested value with every tensor on one device."""
    leaves, structure = flatten(nest)
    return structure.unflatten(to_device(leaves, device))
