"""``torch.compile`` of the segments that a stream runs, kept where it is faster."""

from __future__ import annotations

from placer import devices
from placer.executor.compiled_segments import Backend, Border, CompiledSegment, obstacle, told, trial_ms
from placer.executor.inference.stage import Stage


def compile_stage(stage: Stage, backend: Backend) -> None:
    """Let a stage whose slots are open run compiled, if that is faster.

    Args:
        stage: notes in ``compiled`` what was gained, or in ``not_compiled_because`` why it stays as it is.
        backend: of ``torch.compile``.
    """
    stage.not_compiled_because = obstacle(stage.segment)
    if stage.number is not None:
        stage.not_compiled_because = f"it reads {stage.number!r}, a number that depends on values of tensors"
    if stage.not_compiled_because:
        return
    plain, run = stage.segment, stage.slots[0].run
    try:
        before_ms = trial_ms([run], stage.device)
    except devices.NotRecordable as error:
        stage.not_compiled_because = f"it runs without CUDA graphs: {error}"
        return
    try:
        stage.segment = CompiledSegment.of(plain, Border(stage.reads, tuple(stage.writes)), backend)
        after_ms = trial_ms([run], stage.device)
    except Exception as error:  # whatever a compiler may raise: the segment runs without it
        stage.segment, stage.not_compiled_because = plain, told(error)
        return
    times = f"{after_ms:.3g} ms, {before_ms:.3g} ms without"
    if after_ms < before_ms:
        stage.compiled = times
    else:
        stage.segment, stage.not_compiled_because = plain, f"it is no faster: {times}"
