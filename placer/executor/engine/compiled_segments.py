"""Segments as one compiled function: what ``torch.compile`` is given, and how a micro-batch runs
through it.

Shapes are static (``dynamic=False``): a slot has one, and torch, which tells functions apart by
file and line, would take what differs between two segments for variable and make slower kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.capture.weight_grads.deferred import Queue
from placer.errors import InputError
from placer.executor.engine.checkpointed_segments import CheckpointedSegment
from placer.executor.segments import MicroBatch, Segment

Backend = str | Callable[..., Any]
"""What ``torch.compile`` takes as one."""

INDUCTOR = "inductor"
"""Torch's own."""

_REPEATS = 5
_GAIN = 0.005
"""Share of its time that a compiled function must save to be kept: less is no more than how far
measurements lie apart, and its numbers are rounded otherwise."""


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
        return INDUCTOR
    if callable(compile) and isinstance(compile, Hashable):
        return compile
    if not isinstance(compile, str):
        raise InputError(
            f"compile={compile!r}: give True, False, a hashable function, or the name of a backend"
        )
    known = torch.compiler.list_backends(exclude_tags=())
    if compile not in known:
        raise InputError(
            f"compile={compile!r} is no backend of torch.compile; it knows {', '.join(sorted(known))}"
        )
    return compile


@dataclass(frozen=True)
class Border:
    """What a segment is given and what it makes for others, by name.

    Attributes:
        reads: what it is given.
        writes: what others read.
        unawaited: of these, what no gradient comes for: a compiled backward pass would take zeros
            for it.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    unawaited: frozenset[str] = frozenset()

    def written(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """What others read, of all values."""
        # a list: the compiler reads this
        return tuple([self._apart(name, values[name]) for name in self.writes])

    def _apart(self, name: str, value: Any) -> Any:
        return value.detach() if name in self.unawaited and isinstance(value, Tensor) else value


@dataclass
class CompiledSegment(Segment):
    """A segment as one compiled function, its backward passes whole.

    Attributes:
        border: what it is given and makes.
        function: ``function(reads, states) -> writes``.
    """

    border: Border = field(default_factory=Border)
    function: Callable[..., Any] = lambda *given: ()

    @classmethod
    def of(cls, segment: Segment, border: Border, backend: Backend) -> CompiledSegment:
        """Compile a segment; the compiler runs when it first runs.

        Args:
            segment: what to compile.
            border: what it is given and makes.
            backend: of ``torch.compile``.
        """
        made = torch.compile(own_code(_function(segment, border)), backend=backend, dynamic=False)
        return cls(segment.device, segment.steps, border, made)

    def deferring(self, queue: Queue) -> AbstractContextManager[Any]:
        """Nothing is left for later."""
        return nullcontext()

    def counting(self) -> AbstractContextManager[Any]:
        """The compiler saw to them."""
        return nullcontext()

    def run(self, values: MicroBatch) -> None:
        """Compute the segment for one micro-batch."""
        values.trail.enter(f"{self.steps[0].layer.name} to {self.steps[-1].layer.name}, compiled")
        reads = [values.read(name, self.device) for name in self.border.reads]
        with devices.current(self.device):
            writes = self._computed(reads, [step.state for step in self.steps])
        values.write(self.border.writes, writes)

    def _computed(self, reads: list[Any], states: list[list[Tensor]]) -> tuple[Any, ...]:
        writes: tuple[Any, ...] = self.function(reads, states)
        return writes


def obstacle(segment: Segment) -> str:
    """What forbids to compile a segment; empty if nothing does."""
    if devices.registries:
        return "logical_devices looks at every operation"
    if isinstance(segment, CheckpointedSegment):
        return "it keeps to checkpoints of the model's own"
    for step in segment.steps:
        name = step.layer.name
        if step.foreign:
            return f"layer {name!r} uses state of another device"
        if step.private:
            return f"layer {name!r} changes a buffer of which each micro-batch has a copy"
    return ""


@contextmanager
def modes_kept() -> Iterator[None]:
    """What a compiler that fails leaves of autocast, and of whether gradients are wanted, is as
    before.
    """
    kinds = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    cached, depth, gradients = (
        torch.is_autocast_cache_enabled(),
        _autocast_depth(),
        torch.is_grad_enabled(),
    )
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_autocast_cache_enabled(cached)
        for kind, enabled, dtype in kinds:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        for _ in range(_autocast_depth() - depth):
            torch.autocast_decrement_nesting()


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def trial_ms(passes: Sequence[Callable[[], None]], device: torch.device) -> float:
    """Time of passes one after another, as they will run: recorded, where there are CUDA graphs.

    Args:
        passes: of one slot.
        device: where they run.

    Raises:
        devices.NotRecordable: they cannot be recorded.
    """
    if device.type == "cuda":
        recorded = devices.record(passes, device)
        return sum(median(times) for times in devices.queued_ms(recorded, device, _REPEATS))
    times = []
    for _ in range(1 + _REPEATS):
        began = perf_counter()
        for run in passes:
            run()
        times.append(1e3 * (perf_counter() - began))
    return median(times[1:])


def gains(after_ms: float, before_ms: float) -> bool:
    """Whether what is compiled is faster by more than chance.

    Args:
        after_ms: its time.
        before_ms: that of the same without the compiler.
    """
    return after_ms < (1 - _GAIN) * before_ms


def told(error: Exception) -> str:
    """What a compiler raised, in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _function(
    segment: Segment, border: Border
) -> Callable[[list[Any], list[list[Tensor]]], tuple[Any, ...]]:
    device, layers = known_to_compilers(segment.device), [step.layer for step in segment.steps]

    def run(given: list[Any], states: list[list[Tensor]]) -> tuple[Any, ...]:
        values: Mapping[str, Any] = dict(zip(border.reads, given))  # noqa: B905 - the compiler reads this
        for layer, state in zip(layers, states):  # noqa: B905
            made = layer.function(device, state, [values[name] for name in layer.reads])
            values = {**values, **dict(zip(layer.writes, made))}  # noqa: B905
        return border.written(values)

    return run


def known_to_compilers(device: torch.device) -> torch.device:
    """The device; of a stand-in the CPU, beside which a numbered one would be another to a
    compiler.
    """
    return torch.device(devices.CPU) if device.type == devices.CPU else device


def own_code(function: Any) -> Any:
    """The same function over a code object of its own: the compiler counts by code object how often
    it recompiled.
    """
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
