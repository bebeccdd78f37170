"""``torch.compile`` of a whole segment, kept where it is faster.

It fuses what a layer border would keep apart. What it gains is measured against the same segment without it, on the
device; where it gains nothing, or cannot compile the segment, the segment stays as it was and the reason is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor

from placer import devices
from placer.errors import InputError
from placer.executor.checkpointed import CheckpointedSegment
from placer.executor.recomputed import RecomputedStage
from placer.executor.segments import MicroBatch, Segment
from placer.executor.stage import Stage

Backend = str | Callable[..., Any]
_REPEATS = 5


def backend_of(compile: bool | Backend | None) -> Backend | None:
    """The backend of torch.compile that a user asks for; None for none.

    Args:
        compile: True for torch's own, a name, or what torch.compile takes in its place.

    Raises:
        InputError: torch knows no backend of that name, or it is none.
    """
    if compile is None or compile is False:
        return None
    if compile is True:
        return "inductor"
    if callable(compile):
        return compile
    if not isinstance(compile, str):
        raise InputError(f"compile={compile!r}: give True, False, a function, or the name of a backend")
    known = torch.compiler.list_backends(exclude_tags=())
    if compile not in known:
        raise InputError(f"compile={compile!r} is no backend of torch.compile; it knows {', '.join(sorted(known))}")
    return compile


@dataclass
class CompiledSegment(Segment):
    """A segment as one compiled function.

    Attributes:
        reads: names of the values that it is given.
        writes: names of those that it makes for others.
        function: ``function(reads, states) -> writes``.
    """

    is_opaque: ClassVar[bool] = True
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    function: Callable[[list[Any], list[list[Tensor]]], tuple[Any, ...]] = lambda reads, states: ()

    @classmethod
    def of(cls, segment: Segment, reads: Sequence[str], writes: Sequence[str], backend: Backend) -> CompiledSegment:
        """Compile a segment; the compiler runs when it first runs.

        Args:
            segment: what to compile.
            reads: names of the values that it is given.
            writes: names of those that others read.
            backend: of ``torch.compile``.
        """
        own = _own_code(_function(segment, tuple(reads), tuple(writes)))
        return cls(segment.device, segment.steps, tuple(reads), tuple(writes), torch.compile(own, backend=backend))

    def run(self, values: MicroBatch) -> None:
        """Compute the segment for one micro-batch."""
        values.trail.enter(f"{self.steps[0].layer.name} to {self.steps[-1].layer.name}, compiled")
        reads = [values.read(name, self.device) for name in self.reads]
        with devices.current(self.device):
            writes = self.function(reads, [step.state for step in self.steps])
        values.write(self.writes, writes)


def compile_stage(stage: Stage, backend: Backend) -> None:
    """Let a stage whose slots are open run compiled, if that is faster.

    Args:
        stage: notes in ``compiled`` what was gained, or in ``not_compiled_because`` why it stays as it is.
        backend: of ``torch.compile``.
    """
    stage.not_compiled_because = _obstacle(stage)
    if stage.not_compiled_because:
        return
    plain, split = stage.segment, stage.split
    try:
        before_ms = _trial_ms(stage)
    except devices.NotRecordable as error:
        stage.not_compiled_because = f"it runs without CUDA graphs: {error}"
        return
    try:
        stage.split, stage.reuses = False, True  # compiled backward passes write to what the forward pass left
        stage.segment = CompiledSegment.of(plain, stage.reads, _wanted(stage), backend)
        after_ms = _trial_ms(stage)
    except Exception as error:  # whatever a compiler may raise: the segment runs without it
        stage.not_compiled_because = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    else:
        times = f"{after_ms:.3g} ms forwards and backwards, {before_ms:.3g} ms without"
        if after_ms < before_ms:
            stage.compiled = times
            return
        stage.not_compiled_because = f"it is no faster: {times}"
    stage.segment, stage.split, stage.reuses = plain, split, False


def _obstacle(stage: Stage) -> str:
    """What forbids to compile a stage; empty if nothing does."""
    if devices.registries:
        return "logical_devices looks at every operation"
    if stage.gathers:
        return "deferred_batch_norm takes batch normalisations apart"
    if isinstance(stage, RecomputedStage):
        return "it recomputes"
    if isinstance(stage.segment, CheckpointedSegment):
        return "it keeps to checkpoints of the model's own"
    foreign = next((step.layer.name for step in stage.segment.steps if step.foreign), None)
    return "" if foreign is None else f"layer {foreign!r} uses state of another device"


def _wanted(stage: Stage) -> list[str]:
    """The values that a segment makes and something outside it reads."""
    made = {name for step in stage.segment.steps for name in step.layer.writes}
    names = [*stage.writes, *(stage.head.names if stage.head is not None else ())]
    return [name for name in dict.fromkeys(names) if name in made]


def _trial_ms(stage: Stage) -> float:
    """Time of a forward and a backward pass of the first slot."""
    slot = stage.slots[0]
    passes: list[Callable[[], None]] = [slot.forward, slot.backward, slot.weights]
    if stage.device.type == "cuda":
        recorded = devices.record(passes, stage.device)
        return sum(median(times) for times in devices.queued_ms(recorded, stage.device, _REPEATS))
    times = []
    for _ in range(1 + _REPEATS):
        began = perf_counter()
        for run in passes:
            run()
        times.append(1e3 * (perf_counter() - began))
    return median(times[1:])


def _function(
    segment: Segment, reads: tuple[str, ...], writes: tuple[str, ...]
) -> Callable[[list[Any], list[list[Tensor]]], tuple[Any, ...]]:
    device, layers = segment.device, [step.layer for step in segment.steps]

    def run(given: list[Any], states: list[list[Tensor]]) -> tuple[Any, ...]:
        values: Mapping[str, Any] = dict(zip(reads, given))  # noqa: B905 - the compiler reads this
        for layer, state in zip(layers, states):  # noqa: B905
            made = layer.function(device, state, [values[name] for name in layer.reads])
            values = {**values, **dict(zip(layer.writes, made))}  # noqa: B905
        return tuple([values[name] for name in writes])

    return run


def _own_code(function: Any) -> Any:
    """The same function over a code object of its own: the compiler counts by code object how often it recompiled."""
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
