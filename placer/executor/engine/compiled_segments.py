"""Segments as one compiled function: what ``torch.compile`` compiles, and how it runs.

Shapes are static (``dynamic=False``): a slot has one shape. torch tells functions apart by file and
line, so otherwise it would take what differs between two segments for variable, and generate slower
kernels.
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
from placer.capture.weight_grads.deferred import GradientQueue
from placer.errors import InputError
from placer.executor.engine.checkpointed_segments import CheckpointedSegment
from placer.executor.segments import MicroBatch, Segment

Backend = str | Callable[..., Any]
"""A backend of ``torch.compile``: its name, or a function."""

INDUCTOR = "inductor"
"""The backend of torch itself."""

_REPEATS = 5
"""Measured runs of a trial; the median counts."""

_GAIN = 0.005
"""Share of its time that a compiled function must save to be kept.

Two measurements of the same passes differ by about as much, and compiled passes round numbers
differently, which must be worth it."""


def backend_of(compile: bool | Backend | None) -> Backend | None:
    """Return the backend of torch.compile that a user asks for, or None.

    Args:
        compile: True for torch's own backend, the name of one, or a function that torch.compile
            takes in its place.

    Raises:
        InputError: torch has no backend of that name, or ``compile`` is of another type.
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
            f"compile={compile!r} is not a backend of torch.compile; "
            f"give one of {', '.join(sorted(known))}"
        )
    return compile


@dataclass(frozen=True)
class Border:
    """The values that a segment is given and those that it makes for others, by name.

    Attributes:
        reads: what it is given.
        writes: what others read.
        unawaited: names among ``writes`` that no gradient comes for. A compiled backward pass would
            take zeros for it.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    unawaited: frozenset[str] = frozenset()

    def written(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what others read, from all values."""
        # a list: the compiler reads this
        return tuple([self._apart(name, values[name]) for name in self.writes])

    def _apart(self, name: str, value: Any) -> Any:
        return value.detach() if name in self.unawaited and isinstance(value, Tensor) else value


@dataclass
class CompiledSegment(Segment):
    """A segment as one compiled function, whose backward passes are whole.

    Attributes:
        border: the values that it is given and makes.
        function: ``function(reads, states) -> writes``.
    """

    border: Border = field(default_factory=Border)
    function: Callable[..., Any] = lambda *given: ()

    @classmethod
    def from_segment(cls, segment: Segment, border: Border, backend: Backend) -> CompiledSegment:
        """Compile a segment; the compiler runs when the segment first runs.

        Args:
            segment: what to compile.
            border: the values that it is given and makes.
            backend: of ``torch.compile``.
        """
        made = torch.compile(own_code(_function(segment, border)), backend=backend, dynamic=False)
        return cls(segment.device, segment.steps, border, made)

    def deferring(self, queue: GradientQueue) -> AbstractContextManager[Any]:
        """Return an empty context: no weight gradient is left for later."""
        return nullcontext()

    def counting(self) -> AbstractContextManager[Any]:
        """Return an empty context: the compiler has fused the counters."""
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
    """Return why a segment cannot be compiled; an empty string if nothing is known to forbid it."""
    # The compiler would trace the observer of logical_devices instead of the model.
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
    """Restore the modes of autocast and autograd, which a compiler that fails may leave changed."""
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
    """Return the time of passes one after another, as they will run: recorded, where that can be.

    Args:
        passes: the passes of one slot.
        device: where they run.

    Returns:
        Milliseconds, the median of a few runs.

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
    """Return whether the compiled passes are faster by more than the noise of a measurement.

    Args:
        after_ms: the time with the compiler.
        before_ms: the time without it.
    """
    return after_ms < (1 - _GAIN) * before_ms


def error_line(error: Exception) -> str:
    """Return in one line which error a compiler raised."""
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
    """Return the device, or plain ``cpu`` for a stand-in, whose number compilers do not know."""
    return torch.device(devices.CPU) if device.type == devices.CPU else device


def own_code(function: Any) -> Any:
    """Return the same function with a code object of its own.

    The compiler counts recompilations by code object, and gives up after a few.
    """
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
