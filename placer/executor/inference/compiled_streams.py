"""``torch.compile`` of the segments that a stream runs, kept where it is faster."""

from __future__ import annotations

import torch
from torch import Tensor

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
from placer.executor.engine.slot import Slot
from placer.executor.engine.stage import Stage


def compile_stage(stage: Stage[Slot], backend: Backend) -> None:
    """Let a stage whose slots are open run compiled, if that is faster.

    Args:
        stage: ``compiled`` notes what was gained, or ``not_compiled_because`` why nothing was.
        backend: of ``torch.compile``.
    """
    stage.not_compiled_because = stage.number_obstacle or obstacle(stage.segment)
    if stage.not_compiled_because:
        return
    plain, trial = stage.segment, _Trial(stage)
    try:
        with modes_kept():
            before_ms = trial.ms()
            stage.segment = CompiledSegment.from_segment(
                plain, Border(stage.reads, tuple(stage.writes)), backend
            )
            after_ms = trial.ms()
    except Exception as error:
        # whatever a compiler may raise: the segment runs without it
        stage.segment, stage.not_compiled_because = plain, error_line(error)
        return
    finally:
        trial.restore()
    times = f"{after_ms:.3g} ms, {before_ms:.3g} ms without"
    if gains(after_ms, before_ms):
        stage.compiled = times
    else:
        stage.segment, stage.not_compiled_because = plain, f"it is no faster: {times}"


class _Trial:
    """Repeated runs of a stage's first slot, each from the same inputs and the same state.

    Layers may write to what they read, and a buffer that counts batches must count only those that
    come.
    """

    def __init__(self, stage: Stage[Slot]) -> None:
        self._slot = stage.slots[0]
        self._device = stage.device
        state = {
            name: tensor
            for step in stage.segment.steps
            for name, tensor in zip(step.layer.state, step.state, strict=True)
            if name in step.layer.mutated
        }
        inputs = [value for value in self._slot.inputs.values() if isinstance(value, Tensor)]
        self._kept = [(tensor, tensor.clone()) for tensor in (*state.values(), *inputs)]

    def ms(self) -> float:
        """Return the time of a run in milliseconds."""
        return trial_ms([self._run], self._device)

    @torch.no_grad()
    def restore(self) -> None:
        """Give state and inputs the values that they had at first."""
        for tensor, value in self._kept:
            tensor.copy_(value)

    def _run(self) -> None:
        self.restore()
        self._slot.passes["forward"]()
