"""Calls of a placed model: through a captured graph's segments or through hooks.

    call ──▶ micro-batches ──▶ captured ──▶ recorded: as a stream    ──┐
                  │                 └─────▶ else: segment by segment ──┼──▶ joined results
                  └──────────▶ not captured: through hooks           ──┘

Calls that come again are recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.argument_checks import require_chunks
from placer.capture.batch_dims.batch_layout import Call
from placer.capture.batch_dims.declared_layout import require_batch_options
from placer.capture.export import checkpoints
from placer.capture.python_state.mutable_inputs import write_back
from placer.errors import InputError
from placer.executor.checks.batch_check import Weights
from placer.executor.device_map import device_map_set
from placer.executor.engine.compiled_segments import Backend
from placer.executor.engine.fill_drain import may_run_by_layer
from placer.executor.engine.shares import call_sizes
from placer.executor.generation.calls import attention_of
from placer.executor.generation.generations import CancelledError, Generations
from placer.executor.inference.repeated_calls import CapturedCall, RepeatedCalls
from placer.executor.inference.stream import Streams
from placer.executor.micro_batches import Cutter, MicroBatches, weights_of
from placer.executor.model_captures import Capture
from placer.executor.output_joining import join
from placer.executor.placed_model import PlacedModel, call_captured, joined
from placer.executor.settings import Settings
from placer.executor.stage_errors import nothing_held
from placer.executor.state.assignment import Assignment
from placer.executor.state.batch_statistics import refuse_uncaptured
from placer.executor.state.replication import ONE_PIPELINE
from placer.schema import BatchOptions
from placer.utils.python_objects import attribute_set

Around: TypeAlias = Callable[..., Any]
"""Runs a function: its arguments are the function, and the function's arguments."""


class PlacedCalls:
    """The calls of a placed model, and the streams that repeated calls are run as.

    Args:
        placed: the model.
        settings: of the flow.

    Attributes:
        streams: all streams of the flow.
        decoding: the recorded passes of one token, for ``generate`` in any thread.
        make_room: frees device memory for a call that lacked it; returns whether it freed any, so
            that the call runs again.
    """

    def __init__(self, placed: PlacedModel, settings: Settings) -> None:
        self._placed = placed
        self._settings = settings
        self.streams = Streams(placed, settings, self.run_whole)
        self.decoding = Generations(
            placed.module, placed.hooks, placed.lock, partial(self.applied, is_guest=True)
        )
        self.make_room: Callable[[], bool] = nothing_freed
        self._block = _Block()
        # while any thread is in ``applied``: what makes the model's calls the flow's
        self._replaced: ExitStack | None = None
        self._blocks = 0
        self._records = True
        self._backend: Backend | None = None
        self.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        return PlacedCalls, (self._placed, self._settings)

    def forget(self) -> None:
        """Discard recordings, and which batches and calls came before."""
        self.drop_recordings()
        self._cutter = Cutter(self._placed, self._settings)
        self._repeated = RepeatedCalls(self.streams)
        self._repeated_for: Any = None

    def drop_recordings(self) -> None:
        """Discard what was recorded for the map in force."""
        self.streams.clear()
        self.decoding.clear()

    def run(
        self,
        call: Call,
        chunks: int,
        options: BatchOptions,
        target: torch.device | None,
        is_shared: bool = False,
    ) -> tuple[Any, torch.device]:
        """Run the model; before the first ``update_flow``, unplaced.

        Args:
            call: positional and keyword arguments, on any device.
            chunks: the number of micro-batches.
            options: where the samples of the batch lie, and how results are joined.
            target: the device of results; None for the device of the last layer.
            is_shared: whether the pipelines of a placement with replicas share each micro-batch, if
                the call need not be eager. Otherwise the first one runs it.

        Returns:
            The model's result, and the device of its tensors.
        """
        require_chunks(chunks)
        require_batch_options(options)
        try:
            return self._run(call, chunks, options, target, is_shared)
        except torch.OutOfMemoryError:
            # a pass in training mode has changed buffers already
            if self._placed.module.training or not self.make_room():
                raise
        return self._run(call, chunks, options, target, is_shared)

    def _run(
        self,
        call: Call,
        chunks: int,
        options: BatchOptions,
        target: torch.device | None,
        is_shared: bool,
    ) -> tuple[Any, torch.device]:
        """Run the model once; see ``run``."""
        if self._placed.assignment is None:
            self._settings.warn_of_edits()
            return self._run_unplaced(call)
        hooks = self._placed.hooks
        # The lock also while it runs: a GPU that records for one thread does nothing for others.
        with nothing_held(), self._turn(), hooks.alone(), hooks.paused():
            if self._placed.assignment is None:  # another thread has undone it meanwhile
                return self._run_unplaced(call)
            weigh = partial(_weigh, options, call)
            replication = self._settings.replication
            if not is_shared or self._must_be_eager():
                replication = ONE_PIPELINE
            sizes_of = partial(call_sizes, replication, chunks)
            cut = self._cutter.cut(call, options, sizes_of, weigh)
            weights = _summed(weigh, cut)
            pipelines = [part % replication.count for part in range(len(cut.parts))]
            captures, results = self._run_recorded(cut, pipelines)
            if captures is None:
                return self._run_hooked(call, cut, weights, target)
            if results is None:
                results, place = self._run_segments(captures, cut, pipelines, target)
            else:
                place = target or self._placed.plan(captures[0])[1][-1].device
        graphs = [capture.exported for capture in captures]
        result, left = joined(results, graphs, cut.sizes, cut.joining, weights)
        if (found := graphs[0].input_changes) is not None and not (
            cut.layout.lists and len(graphs) > 1
        ):
            found.write_back(call, cut.tensors, left)
        return result, place

    def run_whole(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on one micro-batch; return its result on the output device."""
        own = self._settings
        return self.run((args, kwargs), 1, own.batch_options, own.output_device)[0]

    def run_for_loss(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, torch.device]:
        """Run the model on one micro-batch, and leave the results on the device of the last layer.

        A loss of them runs there.

        Args:
            args: as the model takes them, on any device.
            kwargs: the same.

        Returns:
            The model's result, and the device that all its tensors are on.
        """
        return self.run((args, kwargs), 1, self._settings.batch_options, None)

    def cut(
        self,
        call: Call,
        options: BatchOptions,
        sizes_of: Callable[[int], list[int]],
        weigh: Weights,
    ) -> MicroBatches:
        """Split a call into micro-batches; see ``Cutter.cut`` for the arguments."""
        return self._cutter.cut(call, options, sizes_of, weigh, self._placed.needs_captures)

    @contextmanager
    def applied(
        self,
        record: bool | None = None,
        backend: Backend | None = None,
        *,
        is_guest: bool = False,
        is_apart: bool = False,
        is_cancelled: Callable[[], bool] | None = None,
        around: Around | None = None,
    ) -> Iterator[nn.Module]:
        """Let the model itself run placed inside the block; see ``DataFlow.applied``.

        Args:
            record: whether to decode through recorded passes; None as around the block, or True.
            backend: of ``torch.compile``, for these passes; None as around the block, or none.
            is_guest: whether a thread that is in such a block waits for this one.
            is_apart: whether the thread has streams of its own in any case.
            is_cancelled: returns whether calls of the model are to raise a CancelledError.
            around: runs each call of the model; only the first block can give it.
        """
        placed = self._placed
        if placed.weights.clones is not None and placed.assignment is not None:
            raise InputError(
                "`flow.applied()` does not support clones: make the flow without enable_clone"
            )
        with placed.lock.block(self, is_guest):
            assignment = placed.assignment
            if assignment is None:
                self._settings.warn_of_edits()
                yield placed.module
                return
            if record is None:
                record = self._records if is_guest else self._block.records
            elif not self._blocks:
                self._records = record
            if backend is None:
                backend = self._backend if is_guest else self._block.backend
            if not self._blocks:
                self._backend = backend
            places = list(dict.fromkeys([*assignment.devices, self._settings.output_device]))
            with (
                devices.joined(),
                placed.hooks.standing(assignment, again=self.applied),
                self.decoding.slot(places, is_apart),
                self._block.set(record, backend, is_cancelled),
            ):
                self._enter(assignment, around)
                try:
                    yield placed.module
                finally:
                    self._leave()

    def _enter(self, assignment: Assignment, around: Around | None) -> None:
        """Let calls of the model be the flow's; the first thread in a block changes the model."""
        placed = self._placed
        with placed.lock:
            if not self._blocks:
                placed.bring_back()
                with ExitStack() as stack:
                    stack.enter_context(self._calls(partial(self._around, around)))
                    stack.enter_context(device_map_set(placed.module, assignment))
                    stack.enter_context(self.decoding.replaced())
                    self._replaced = stack.pop_all()
            self._blocks += 1

    def _leave(self) -> None:
        """Undo ``_enter``, after the last block."""
        with self._placed.lock:
            self._blocks -= 1
            if not self._blocks and self._replaced is not None:
                self._replaced.close()
                self._replaced = None

    def _calls(self, called: Callable[..., Any]) -> AbstractContextManager[None]:
        """Return a context in which calls of the model are the flow's.

        A model whose class has a ``__call__`` of its own keeps it: it may do more, as any other
        method.

        Args:
            called: takes the arguments of a call; it may run the model by its ``_call_impl``.
        """
        module = self._placed.module
        if not type(module).__call__.__module__.startswith("torch."):
            return nullcontext()
        # ``module.compile()`` puts its own replacement of calls there, too
        return attribute_set(module, "_compiled_call_impl", called)

    def _around(self, around: Around | None, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model while the flow is applied to it, inside of ``around``."""
        hooks = self._placed.hooks
        if around is None or hooks.runs or not devices.observed() or hooks.are_elsewhere:
            return self._decoded(*args, **kwargs)
        return around(self._decoded, *args, **kwargs)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model while the flow is applied to it."""
        hooks = self._placed.hooks
        self._block.refuse_cancelled()
        # the flow itself runs it, or captures it
        if hooks.runs or not devices.observed():
            return self._placed.module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if hooks.are_elsewhere:
            raise InputError(
                "the flow is applied to this model in another thread; enter `with flow.applied():` "
                "in the thread that calls the model, or call the flow, which waits for the other "
                "thread"
            )
        return self.run_whole(*args, **kwargs)

    def _decoded(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model while the flow is applied to it, recorded if it decodes."""
        through_flow, hooks = partial(self._called, *args, **kwargs), self._placed.hooks
        self._block.refuse_cancelled()
        if hooks.runs or not devices.observed() or hooks.are_elsewhere:
            return through_flow()
        with self.decoding.call():
            if self._block.records:
                target, backend = self._settings.output_device, self._block.backend
                with nothing_held(), self._turn(), hooks.paused():
                    found = self.decoding.run(args, kwargs, target, through_flow, backend)
                if found is not None:
                    return found[0]
            with attention_of(args, kwargs):
                return through_flow()

    def _turn(self) -> AbstractContextManager[Any]:
        """Return the lock, or nothing for layers that run again in a backward pass.

        The thread that waits for that pass may hold the lock.
        """
        return nullcontext() if self._placed.hooks.run_again else self._placed.lock

    def _run_unplaced(self, call: Call) -> tuple[Any, torch.device]:
        args, kwargs = call
        return self._placed.module(*args, **kwargs), self._settings.output_device

    def _run_recorded(
        self, cut: MicroBatches, pipelines: Sequence[int]
    ) -> tuple[list[Capture] | None, list[list[Any]] | None]:
        """Return the captures of a call, and its results if it is recorded.

        The captures are None if the call runs through hooks.
        """
        placed, parts = self._placed, cut.parts
        captures, results = self._run_ahead(cut, pipelines)
        if results is None:
            # inside it, constants could not be trained with later
            with torch.inference_mode(False):
                # A capture changes torch's classes for a while, which other threads run meanwhile.
                captures = placed.captures.captures(
                    parts,
                    placed.needs_captures,
                    waits=placed.hooks.stand,
                    known_only=placed.lock.has_other_blocks,
                )
        if captures is not None and placed.captures.stops_gradients(captures, parts):
            return None, None
        if results is None and captures is not None and self._can_be_streamed(cut.sizes):
            self._forget_outdated_calls()
            results = self._repeated.run(self._captured_call(captures, cut, pipelines))
        return captures, results

    def _captured_call(
        self, captures: Sequence[Capture], cut: MicroBatches, pipelines: Sequence[int]
    ) -> CapturedCall:
        """Return a call; a micro-batch that others may not run goes to the first pipeline."""
        each = zip(captures, pipelines, strict=True)
        used = [one if one and self._placed.has_replicas(capture) else 0 for capture, one in each]
        return CapturedCall(captures, [part.tensors for part in cut.parts], cut.sizes, used)

    def _run_ahead(
        self, cut: MicroBatches, pipelines: Sequence[int]
    ) -> tuple[list[Capture] | None, list[list[Any]] | None]:
        """Run a call that is recorded, and see meanwhile whether the model has changed.

        There are no results if it has.
        """
        known = self._placed.captures
        captures = known.captures_before(cut.parts) if self._can_be_streamed(cut.sizes) else None
        if captures is None:
            return None, None
        self._forget_outdated_calls()
        issued = self._captured_call(captures, cut, pipelines)
        return captures, self._repeated.ahead(issued, known.is_unchanged)

    def _forget_outdated_calls(self) -> None:
        """Forget which calls came before the map or the captures changed."""
        now = self._placed.assignment, self._placed.captures.times_forgotten
        if now != self._repeated_for:
            self._repeated, self._repeated_for = RepeatedCalls(self.streams), now

    def _can_be_streamed(self, sizes: list[int]) -> bool:
        """Return whether a call may be recorded: it leaves no trace, and the map stays for a while.

        A call that is not cut is recorded only if it runs on GPUs alone: a processor would gain
        nothing.
        """
        places = self._settings.devices
        helps = len(sizes) > 1 or all(place.type == "cuda" for place in places)
        return helps and not self._must_be_eager()

    def _must_be_eager(self) -> bool:
        """Return whether a call has to be eager, and in the first pipeline.

        It may change the model, autograd or another thread may see it, or weights rest on the host.
        """
        kept = torch.is_grad_enabled() or devices.has_tangents() or self._placed.module.training
        # Other generations may draw random numbers, which they cannot during a recording.
        # A recording of a stream may also share workspaces of libraries with a generation's.
        kept = kept or self._placed.lock.has_other_blocks or bool(self._settings.resting)
        return kept or self._placed.weights.clones is not None

    def _run_segments(
        self,
        captures: list[Capture],
        cut: MicroBatches,
        pipelines: Sequence[int],
        target: torch.device | None,
    ) -> tuple[list[list[Any]], torch.device]:
        """Run each micro-batch through its segments; return the results and their device."""
        issued = self._captured_call(captures, cut, pipelines)
        plans = self._placed.planned(captures, issued.pipelines)
        place = target or plans[0][1][-1].device
        deferred = self._settings.deferred_batch_norm and self._placed.module.training
        # While the flow is applied, a key/value cache stays with the layers that read it.
        is_applied = self._placed.hooks.stand
        returned = len(captures[0].exported.outputs.paths) if is_applied else None
        looks = self._repeated.looked_at(issued, self._settings.devices)
        by_layer = not deferred and may_run_by_layer([parts for _, parts in plans])
        times = len(plans) if by_layer else 1
        reading = self._placed.reading(captures[0], times)
        with looks if self._can_be_streamed(cut.sizes) else nullcontext(), reading:
            return call_captured(plans, issued.parts, place, deferred, returned, by_layer), place

    def _run_hooked(
        self,
        call: Call,
        cut: MicroBatches,
        weights: list[float] | None,
        target: torch.device | None,
    ) -> tuple[Any, torch.device]:
        """Run through hooks, micro-batches one after another."""
        placed = self._placed
        if placed.weights.clones is not None:
            raise InputError(
                "enable_clone needs a model that can be captured, and this one cannot: "
                f"{placed.not_captured_because}; make the flow without enable_clone"
            )
        is_training = placed.module.training
        if self._settings.deferred_batch_norm and is_training and len(cut.parts) > 1:
            refuse_uncaptured(placed.module, placed.not_captured_because)
        placed.bring_back()
        began = perf_counter()
        try:
            result = self._through_hooks(call, cut, weights, target)
        except Exception as error:
            if not checkpoints.is_recompute_signal(error):
                placed.captures.doubt_refusal()
            raise
        placed.captures.waiting.note(perf_counter() - began)
        return result

    def _through_hooks(
        self,
        call: Call,
        cut: MicroBatches,
        weights: list[float] | None,
        target: torch.device | None,
    ) -> tuple[Any, torch.device]:
        hooks, assignment = self._placed.hooks, self._placed.assignment
        assert assignment is not None
        if hooks.stand and len(cut.parts) == 1:
            return hooks.call(assignment, *call, target)
        results, structures, after, place = hooks.run(assignment, cut.parts, target)
        if len(cut.parts) == 1:
            write_back(call, after)
        nests = [
            structure.unflatten(leaves)
            for leaves, structure in zip(results, structures, strict=True)
        ]
        return join(nests, cut.sizes, cut.joining, weights), place


def nothing_freed() -> bool:
    """Return False: a flow by itself has no other flow's memory to free."""
    return False


class _Block(threading.local):
    """How this thread runs the model inside ``flow.applied()``.

    Attributes:
        records: whether it decodes through recorded passes.
        backend: of ``torch.compile``, for these passes; None for none.
        is_cancelled: returns whether its calls of the model are to raise a CancelledError; None for
            never.
    """

    def __init__(self) -> None:
        self.records = True
        self.backend: Backend | None = None
        self.is_cancelled: Callable[[], bool] | None = None

    @contextmanager
    def set(
        self, records: bool, backend: Backend | None, is_cancelled: Callable[[], bool] | None
    ) -> Iterator[None]:
        """Change it inside the block."""
        before = self.records, self.backend, self.is_cancelled
        self.records, self.backend = records, backend
        self.is_cancelled = is_cancelled or self.is_cancelled
        try:
            yield
        finally:
            self.records, self.backend, self.is_cancelled = before

    def refuse_cancelled(self) -> None:
        """Raise a CancelledError if nobody takes the result of this thread's generation."""
        if self.is_cancelled is not None and self.is_cancelled():
            raise CancelledError


def _weigh(options: BatchOptions, call: Call, size: int) -> Tensor | None:
    """Return the weight of each sample in results that are means; None if all weigh alike."""
    args, kwargs = call
    inputs = kwargs if not args else args[0] if len(args) == 1 and not kwargs else args
    return weights_of(options, inputs, None, size, "; in a call the target is None")


def _summed(weigh: Weights, cut: MicroBatches) -> list[float] | None:
    """Return the weight of each micro-batch in a mean; None if they weigh by their sizes."""
    each = weigh(cut.layout.size) if len(cut.sizes) > 1 else None
    if each is None:
        return None
    return [float(part.sum()) for part in torch.split(each, cut.sizes)]
