"""``torch.compile`` of a whole segment, kept where it is faster.

It fuses what a layer border would keep apart. What it gains is measured against the same segment without it, on the
device; where it gains nothing, or cannot compile the segment, the segment stays as it was and the reason is told.

Where weight gradients are a pass of their own they stay one: see ``placer.graph.opened``. A segment that cannot be
compiled so is compiled with whole backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.errors import InputError
from placer.executor.checkpointed import CheckpointedSegment
from placer.executor.recomputed import RecomputedStage
from placer.executor.segments import MicroBatch, Segment
from placer.executor.stage import Stage
from placer.graph import autocast
from placer.graph.deferred import Queue
from placer.graph.opened import OpenedFunction, Product, opened

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
    """A segment as one compiled function, its backward passes whole.

    Attributes:
        reads: names of the values that it is given.
        writes: names of those that it makes for others.
        function: ``function(reads, states) -> writes``.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    function: Callable[..., Any] = lambda *given: ()

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

    def deferring(self, queue: Queue) -> AbstractContextManager[Any]:
        """Nothing is left for later."""
        return nullcontext()

    def run(self, values: MicroBatch) -> None:
        """Compute the segment for one micro-batch."""
        values.trail.enter(f"{self.steps[0].layer.name} to {self.steps[-1].layer.name}, compiled")
        reads = [values.read(name, self.device) for name in self.reads]
        with devices.current(self.device):
            writes = self._computed(reads, [step.state for step in self.steps])
        values.write(self.writes, writes)

    def _computed(self, reads: list[Any], states: list[list[Tensor]]) -> tuple[Any, ...]:
        writes: tuple[Any, ...] = self.function(reads, states)
        return writes


@dataclass
class OpenedSegment(CompiledSegment):
    """A segment as one compiled function, whose backward passes leave the weight gradients of products for later.

    Attributes:
        function: ``function(reads, states, openings) -> (writes, given)``, the latter two by layer and product.
        as_written: the same, not compiled.
        products: by layer.
    """

    as_written: Callable[..., Any] = lambda *given: ()
    products: list[tuple[Product, ...]] = field(default_factory=list)
    _queue: Queue | None = None
    _zeros: dict[Hashable, list[list[Tensor]]] = field(default_factory=dict)

    @classmethod
    def of(cls, segment: Segment, reads: Sequence[str], writes: Sequence[str], backend: Backend) -> OpenedSegment:
        """Compile a segment; see ``CompiledSegment``."""
        layers = [opened(step.layer, step.state) for step in segment.steps]
        own = _own_code(_opened_function(segment, [run for run, _ in layers], tuple(reads), tuple(writes)))
        made = torch.compile(own, backend=backend)
        products = [products for _, products in layers]
        return cls(segment.device, segment.steps, tuple(reads), tuple(writes), made, own, products)

    @contextmanager
    def deferring(self, queue: Queue) -> Iterator[None]:
        """Leave to the queue what ``products`` tells."""
        self._queue = queue
        try:
            yield
        finally:
            self._queue = None

    def _computed(self, reads: list[Any], states: list[list[Tensor]]) -> tuple[Any, ...]:
        assert self._queue is not None
        zeros = self._openings(reads, states)
        anchor = torch.zeros((), requires_grad=True)  # what comes from it requires a gradient
        left = [
            [_Left(self._queue, step.layer.name, product, state) for product in products]
            for step, products, state in zip(self.steps, self.products, states, strict=True)
        ]
        openings = [
            [_Opening.apply(anchor, zero, later) for zero, later in zip(*row, strict=True)]  # type: ignore[no-untyped-call]
            for row in zip(zeros, left, strict=True)
        ]
        writes: tuple[Any, ...]
        writes, given = self.function(reads, states, openings)
        for row, items in zip(left, given, strict=True):
            for later, x in zip(row, items, strict=True):
                later.x = x
        return writes

    @torch.no_grad()
    def _openings(self, reads: Sequence[Any], states: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """By layer, a zero as large as each product's result; they take no memory."""
        key = tuple(read.shape if isinstance(read, Tensor) else read for read in reads)
        if key not in self._zeros:
            copies = [
                [
                    tensor.clone() if name in step.layer.mutated else tensor
                    for name, tensor in zip(step.layer.state, state, strict=True)
                ]
                for step, state in zip(self.steps, states, strict=True)
            ]
            closed = [[None] * len(products) for products in self.products]
            with devices.keep_random_state([self.device]):
                _, given = self.as_written(reads, copies, closed)
            self._zeros[key] = [
                [
                    torch.zeros((), dtype=x.dtype, device=x.device).expand(product.shape(x, state))
                    for product, x in zip(products, items, strict=True)
                ]
                for products, items, state in zip(self.products, given, states, strict=True)
            ]
        return self._zeros[key]


@dataclass
class _Left:
    """What a product of a micro-batch leaves for later."""

    queue: Queue
    layer: str
    product: Product
    state: Sequence[Tensor]
    x: Tensor | None = None

    def put(self, gradient: Tensor) -> None:
        """The gradient of the product's result is there."""
        assert self.x is not None
        self.queue.put(replace(self.product.left(self.x, gradient, self.state), layer=self.layer))


class _Opening(torch.autograd.Function):
    """Zeros whose gradient is that of a product's result."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, zeros: Tensor, later: _Left) -> Tensor:
        ctx.later = later
        ctx.set_materialize_grads(False)
        return zeros

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        if gradients[0] is not None:
            ctx.later.put(gradients[0])
        return None, None, None


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
    why_whole = ""
    for kind in (OpenedSegment, CompiledSegment) if split and not autocast.dtype() else (CompiledSegment,):
        stage.split, stage.reuses = kind is OpenedSegment, True  # such passes write to what the forward pass left
        try:
            stage.segment = kind.of(plain, stage.reads, _wanted(stage), backend)
            after_ms = _trial_ms(stage)
        except Exception as error:  # whatever a compiler may raise: the segment runs without it
            why_whole = stage.not_compiled_because = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            continue
        times = f"{after_ms:.3g} ms forwards and backwards, {before_ms:.3g} ms without"
        if after_ms < before_ms:
            stage.compiled = times + (f"; backward passes are whole: {why_whole}" if why_whole else "")
            stage.not_compiled_because = ""
            return
        stage.not_compiled_because = f"it is no faster: {times}"
        break
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
    device, layers = _known_to_compilers(segment.device), [step.layer for step in segment.steps]

    def run(given: list[Any], states: list[list[Tensor]]) -> tuple[Any, ...]:
        values: Mapping[str, Any] = dict(zip(reads, given))  # noqa: B905 - the compiler reads this
        for layer, state in zip(layers, states):  # noqa: B905
            made = layer.function(device, state, [values[name] for name in layer.reads])
            values = {**values, **dict(zip(layer.writes, made))}  # noqa: B905
        return tuple([values[name] for name in writes])

    return run


def _opened_function(
    segment: Segment, layers: Sequence[OpenedFunction], reads: tuple[str, ...], writes: tuple[str, ...]
) -> Callable[[list[Any], list[list[Tensor]], list[list[Any]]], tuple[Any, list[Any]]]:
    device = _known_to_compilers(segment.device)
    steps = [(step.layer.reads, step.layer.writes) for step in segment.steps]

    def run(given: list[Any], states: list[list[Tensor]], openings: list[list[Any]]) -> tuple[Any, list[Any]]:
        values: Mapping[str, Any] = dict(zip(reads, given))  # noqa: B905 - the compiler reads this
        kept = []
        for layer, (read, written), state, own in zip(layers, steps, states, openings):  # noqa: B905
            made, items = layer(device, state, [values[name] for name in read], own)
            values = {**values, **dict(zip(written, made))}  # noqa: B905
            kept.append(items)
        return tuple([values[name] for name in writes]), kept

    return run


def _known_to_compilers(device: torch.device) -> torch.device:
    """The device; of a stand-in the CPU, beside which a numbered one would be another to a compiler."""
    return torch.device(devices.CPU) if device.type == devices.CPU else device


def _own_code(function: Any) -> Any:
    """The same function over a code object of its own: the compiler counts by code object how often it recompiled."""
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
