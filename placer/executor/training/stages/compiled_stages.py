"""``torch.compile`` of a whole segment, and of the loss, kept where it is faster.

It fuses operations across the borders of layers. A compiled segment is measured against the same
segment without it, on the device. If it is not faster, or cannot be compiled, the segment runs
uncompiled, and the stage notes the reason.

Weight gradients that are a pass of their own stay so: see
``placer.capture.weight_grads.compiled_layers``. A segment that cannot be compiled in this way is
compiled with whole backward passes.
"""

from __future__ import annotations

import torch

from placer import devices
from placer.capture import autocast
from placer.executor.engine.compiled_segments import (
    Backend,
    Border,
    CompiledSegment,
    error_line,
    gains,
    modes_kept,
    obstacle,
    trial_ms,
)
from placer.executor.segments import MicroBatch
from placer.executor.training.stages.recomputed_stage import RecomputedStage
from placer.executor.training.stages.split_segments import OpenedSegment, compiled_loss
from placer.executor.training.stages.training_slot import Head
from placer.executor.training.stages.training_stage import TrainingStage
from placer.utils.dtypes import is_differentiable


def compile_stage(stage: TrainingStage, backend: Backend) -> None:
    """Let a stage whose slots are open run compiled, and its loss too, if that is faster.

    Args:
        stage: ``compiled`` notes what was gained, or ``not_compiled_because`` why nothing was.
        backend: of ``torch.compile``.
    """
    stage.not_compiled_because = _obstacle(stage)
    if stage.not_compiled_because:
        return
    try:
        now_ms = _trial_ms(stage)
    except devices.NotRecordable as error:
        stage.not_compiled_because = f"it runs without CUDA graphs: {error}"
        return
    with modes_kept():
        now_ms = _compile_segment(stage, backend, now_ms)
    if stage.head is not None:
        with modes_kept():
            _compile_loss(stage, stage.head, backend, now_ms)


def _compile_segment(stage: TrainingStage, backend: Backend, before_ms: float) -> float:
    """Compile the segment if that is faster, and return the time of the stage's passes."""
    plain, split = stage.segment, stage.split
    why_whole, border = "", _border(stage)
    for kind in (
        (OpenedSegment, CompiledSegment)
        if split and not autocast.current_dtype()
        else (CompiledSegment,)
    ):
        # Compiled backward passes write to what the forward pass left.
        stage.split, stage.reuses = kind is OpenedSegment, True
        try:
            stage.segment = kind.from_segment(plain, border, backend)
            after_ms = _trial_ms(stage)
        except Exception as error:
            # whatever a compiler may raise: the segment runs without it
            why_whole = stage.not_compiled_because = error_line(error)
            continue
        times = _times(after_ms, before_ms)
        if gains(after_ms, before_ms):
            stage.compiled = times + (
                f"; backward passes are whole: {why_whole}" if why_whole else ""
            )
            stage.not_compiled_because = ""
            return after_ms
        stage.not_compiled_because = f"it is no faster: {times}"
        break
    stage.segment, stage.split, stage.reuses = plain, split, False
    return before_ms


def _compile_loss(stage: TrainingStage, head: Head, backend: Backend, before_ms: float) -> None:
    """Compile the loss if that is faster, also behind a segment that runs uncompiled.

    A loss that cannot be compiled runs uncompiled, too.
    """
    plain = head.loss
    try:
        head.loss = compiled_loss(plain, backend)
        after_ms = _trial_ms(stage)
    except Exception as error:
        after_ms = before_ms
        if stage.compiled:
            stage.compiled += f"; the loss is not: {error_line(error)}"
    if gains(after_ms, before_ms):
        stage.reuses = True  # as in _compile_segment
        times = _times(after_ms, before_ms)
        stage.compiled = (
            f"{stage.compiled}; the loss too: {times}"
            if stage.compiled
            else f"the loss alone: {times}"
        )
    else:
        head.loss = plain


def _times(after_ms: float, before_ms: float) -> str:
    return f"{after_ms:.3g} ms forwards and backwards, {before_ms:.3g} ms without"


def _obstacle(stage: TrainingStage) -> str:
    """Return why a stage cannot be compiled; an empty string if nothing is known to forbid it."""
    if stage.gathers:
        return "deferred_batch_norm takes batch normalisations apart"
    if isinstance(stage, RecomputedStage):
        return "it recomputes"
    return obstacle(stage.segment)


def _border(stage: TrainingStage) -> Border:
    """Return the values that a stage's segment is given and those that it makes for others."""
    made = {name for step in stage.segment.steps for name in step.layer.writes}
    names = [*stage.writes, *(stage.head.names if stage.head is not None else ())]
    writes = [name for name in dict.fromkeys(names) if name in made]
    awaited = {*stage.awaited} | _awaited_by_loss(stage)
    return Border(stage.reads, tuple(writes), frozenset(writes) - awaited)


def _awaited_by_loss(stage: TrainingStage) -> set[str]:
    """Return the names of the values that the loss depends on, among those that it is given."""
    slot, head = stage.slots[0], stage.head
    if head is None:
        return set()
    if len(head.names) == 1:
        return set(head.names)  # a loss that depends on nothing is refused
    batch = MicroBatch(slot.inputs.keys(), slot.inputs.values())
    with torch.no_grad(), autocast.uncached(stage.device):
        stage.segment.run(batch)
    values = {name: batch.read(name, stage.device) for name in head.names}
    leaves = {
        name: value.detach().requires_grad_()
        for name, value in values.items()
        if is_differentiable(value)
    }
    with torch.enable_grad(), autocast.uncached(stage.device):
        loss, _ = head.loss([leaves.get(name, values[name]) for name in head.names], slot.targets)
    with autocast.disabled(stage.device):
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {name for name, gradient in zip(leaves, found, strict=True) if gradient is not None}


def _trial_ms(stage: TrainingStage) -> float:
    """Return the time of all passes of the first slot, in milliseconds."""
    return trial_ms(list(stage.slots[0].passes.values()), stage.device)
