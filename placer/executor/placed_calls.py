"""Calls of a placed flow: through a captured graph's segments or through hooks.

Calls that come again are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import RLock
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.argument_checks import require_chunks
from placer.capture.batch_dims.batch_layout import Call, Part
from placer.capture.batch_dims.declared_layout import refuse_absent_outputs, require_batch_options
from placer.capture.export import checkpoints
from placer.capture.layers import LayerGraph
from placer.capture.python_state.mutable_inputs import write_back
from placer.errors import InputError
from placer.executor.calls import call_captured, calls_instead, joined
from placer.executor.checks.capture_check import difference
from placer.executor.device_map import device_map_set
from placer.executor.engine.fill_drain import even_sizes
from placer.executor.hook_path import HookPath
from placer.executor.inference.repeated_calls import RepeatedCalls
from placer.executor.micro_batches import Cutter, MicroBatches, weights_of
from placer.executor.model_captures import Capture, Program
from placer.executor.output_joining import Joining, join
from placer.executor.pipelined_runs import PipelinedRuns
from placer.executor.segments import Segment
from placer.executor.stage_errors import nothing_held
from placer.executor.state.assignment import Assignment
from placer.executor.state.batch_statistics import refuse_uncaptured
from placer.executor.state.clones import Clones
from placer.schema import BatchOptions


class PlacedCalls(PipelinedRuns):
    """The part of a ``DataFlow`` that runs calls of the model.

    Attributes:
        module: the model.
        lock: held while a call runs.
        output_device: the device of results.
        enable_clone: whether the weights are on every device.
        deferred_batch_norm: whether running statistics follow whole batches.
        batch_options: where the samples of a batch lie, and how results are joined, for calls that
            do not say.
    """

    module: nn.Module
    batch_options: BatchOptions
    lock: RLock
    output_device: torch.device
    enable_clone: bool
    deferred_batch_norm: bool
    _devices: Sequence[torch.device]
    _assignment: Assignment | None
    _program: Program
    _cutter: Cutter
    _hooks: HookPath
    _repeated: RepeatedCalls
    _clones: Clones | None

    @property
    def not_captured_because(self) -> str:
        """Why the model runs through hooks in its present mode; empty unless it does."""
        with self.lock:
            return self._program.refused.get(self._program.mode(), "")

    def forward(
        self,
        *args: Any,
        chunks: int | None = None,
        batch_options: BatchOptions | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model; before the first ``update_flow``, unplaced.

        Args:
            args: as the model takes them, on any device.
            chunks: the number of micro-batches to cut the batch into, which follow one another
                through the devices; the placement's number if None. Batch norm then sees
                micro-batches, as in any pipeline.
            batch_options: where the samples of the batch lie, and how results are joined; the
                flow's own if None.
            kwargs: as the model takes them.

        Returns:
            The model's result, on ``output_device``.

        Raises:
            BatchError: micro-batches give another result than the batch does.
            InputError: the options do not fit the call, or it cannot be cut.
        """
        options = self.batch_options if batch_options is None else batch_options
        count = self.chunks if chunks is None else chunks
        result, _ = self._call((args, kwargs), count, options, self.output_device)
        if options is not self.batch_options:  # the flow's own may name results of its other calls
            refuse_absent_outputs(options, result)
        return result

    def called_for_loss(
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
        return self._call((args, kwargs), 1, self.batch_options, None)

    def _call(
        self, call: Call, chunks: int, options: BatchOptions, target: torch.device | None
    ) -> tuple[Any, torch.device]:
        """Run the model; results go to a device, or to where the last layer runs if it is None."""
        args, kwargs = call
        require_chunks(chunks)
        require_batch_options(options)
        if self._assignment is None:
            self._tell_of_edits()
            return self.module(*args, **kwargs), self.output_device
        # The lock also while it runs: a GPU that records for one thread does nothing for others.
        with nothing_held(), self._turn(), self._hooks.paused():
            if self._assignment is None:  # another thread has undone it meanwhile
                return self.module(*args, **kwargs), self.output_device
            weigh = partial(self._weigh, options, args, kwargs)
            cut = self._cutter.cut(call, options, partial(even_sizes, chunks=chunks), weigh)
            each = weigh(cut.layout.size) if len(cut.sizes) > 1 else None
            weights = (
                None
                if each is None
                else [float(part.sum()) for part in torch.split(each, cut.sizes)]
            )
            captures, results = self._run_recorded(cut.parts, cut.sizes)
            if captures is None:
                return self._run_hooked(call, cut, weights, target)
            plans = self._planned(captures) if results is None else [self._plan(captures[0])]
            place = target or plans[0][1][-1].device
            if results is None:
                deferred = self.deferred_batch_norm and self.module.training
                # While the flow is applied, a key/value cache stays with the layers that read it.
                returned = len(captures[0].exported.outputs.paths) if self._hooks.stand else None
                parts = [part.tensors for part in cut.parts]
                looks = self._repeated.looked_at(captures, parts, cut.sizes, self._devices)
                with looks if self._can_be_streamed(cut.sizes) else nullcontext():
                    results = call_captured(plans, parts, place, deferred, returned)
        graphs = [capture.exported for capture in captures]
        result, left = joined(results, graphs, cut.sizes, cut.joining, weights)
        if (found := graphs[0].input_changes) is not None and not (
            cut.layout.lists and len(graphs) > 1
        ):
            found.write_back(call, cut.tensors, left)
        return result, place

    @staticmethod
    def _weigh(
        options: BatchOptions, args: tuple[Any, ...], kwargs: dict[str, Any], size: int
    ) -> Tensor | None:
        """Return the weight of each sample in results that are means; None if all weigh alike."""
        inputs = kwargs if not args else args[0] if len(args) == 1 and not kwargs else args
        return weights_of(options, inputs, None, size, "; in a call the target is None")

    def run_compared(self, call: Call) -> Any:
        """Run the placed model, through hooks if it allows them, and captured otherwise.

        It runs captured if it has clones, or modules that allow no hooks.

        Args:
            call: positional and keyword arguments.
        """
        assert self._assignment is not None
        part = self.laid_out(call)
        if self._clones is None and not self._has_scripts():
            self._bring_back()
            (leaves,), (structure,), *_ = self._hooks.run(
                self._assignment, [part], self.output_device
            )
            return structure.unflatten(leaves)
        captures = self._program.captures([part])
        if captures is None:
            raise InputError(f"the model cannot be captured: {self.not_captured_because}")
        (results,) = call_captured(
            self._planned(captures), [part.tensors], self.output_device, False
        )
        return joined([results], [captures[0].exported], [1], Joining())[0]

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Let the model itself run placed, for a while.

            with flow.applied() as model:
                ids = model.generate(ids, max_new_tokens=20)

        A call of the model is a call of the flow, in one micro-batch; its other methods run through
        hooks. This holds in this thread. Other threads' calls of the flow wait until it is over,
        and their calls of the model raise. Operations of the caller's own code are aligned
        meanwhile, too: tensors of two devices are brought to one. What checkpoints run again in a
        backward pass, which may come later, runs as it did in here.

        transformers' ``Trainer`` and accelerate's ``Accelerator``, made and used in here, neither
        move nor wrap the model: it has an attribute ``hf_device_map`` meanwhile.

        Returns:
            The model.

        Raises:
            CaptureError: a module was compiled by torch.jit, which allows no hooks.
            InputError: the flow has clones, which the model's own methods do not use.
        """
        if self._assignment is None:
            self._tell_of_edits()
            yield self.module
            return
        if self._clones is not None:
            raise InputError(
                "`flow.applied()` does not support clones: make the flow without enable_clone"
            )
        with self.lock:
            self._bring_back()
            hooks = self._hooks.standing(self._assignment, again=self.applied)
            with hooks, self._calls(), device_map_set(self.module, self._assignment):
                yield self.module

    def _calls(self) -> AbstractContextManager[None]:
        """Return a context in which calls of the model are the flow's.

        A model whose class has a ``__call__`` of its own keeps it: it may do more, as any other
        method.
        """
        is_torchs = type(self.module).__call__.__module__.startswith("torch.")
        return calls_instead(self.module, self._called) if is_torchs else nullcontext()

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model while the flow is applied to it."""
        # the flow itself runs it, or captures it
        if self._hooks.runs or not devices.observed():
            return self.module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self._hooks.are_elsewhere:
            raise InputError(
                "the flow is applied to this model in another thread; enter `with flow.applied():` "
                "in the thread that calls the model, or call the flow, which waits for the other "
                "thread"
            )
        return self(*args, chunks=1, **kwargs)

    @property
    def _needs_captures(self) -> bool:
        """Whether no call may run through hooks because a capture would take long."""
        return self.enable_clone or self.deferred_batch_norm

    def _turn(self) -> AbstractContextManager[Any]:
        """Return the lock, or nothing for layers that run again in a backward pass.

        The thread that waits for that pass may hold the lock.
        """
        return nullcontext() if self._hooks.run_again else self.lock

    def _run_recorded(
        self, parts: list[Part], sizes: list[int]
    ) -> tuple[list[Capture] | None, list[list[Any]] | None]:
        """Return the captures of a call, and its results if it is recorded.

        The captures are None if the call runs through hooks.
        """
        captures, results = self._run_ahead(parts, sizes)
        if results is None:
            # inside it, constants could not be trained with later
            with torch.inference_mode(False):
                captures = self._program.captures(
                    parts, self._needs_captures, waits=self._hooks.stand
                )
        if captures is not None and self._program.stops_gradients(captures, parts):
            return None, None
        if results is None and captures is not None and self._can_be_streamed(sizes):
            results = self._repeated.run(captures, [part.tensors for part in parts], sizes)
        return captures, results

    def _run_ahead(
        self, parts: list[Part], sizes: list[int]
    ) -> tuple[list[Capture] | None, list[list[Any]] | None]:
        """Run a call that is recorded, and see meanwhile whether the model has changed.

        There are no results if it has.
        """
        captures = self._program.captures_before(parts) if self._can_be_streamed(sizes) else None
        if captures is None:
            return None, None
        tensors = [part.tensors for part in parts]
        return captures, self._repeated.ahead(captures, tensors, sizes, self._program.is_unchanged)

    def _can_be_streamed(self, weights: list[int]) -> bool:
        """Return whether a call may be recorded: it leaves no trace, and the map stays for a while.

        A call that is not cut is recorded only if it runs on GPUs alone: a processor would gain
        nothing.
        """
        kept = torch.is_grad_enabled() or devices.has_tangents() or self.module.training
        helps = len(weights) > 1 or all(place.type == "cuda" for place in self._devices)
        return helps and not (kept or self.enable_clone)

    def _planned(self, captures: list[Capture]) -> list[tuple[LayerGraph, list[Segment]]]:
        """Return the segments of each micro-batch, once their state is in place."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self._planned(captures)
        self._refresh_clones()
        self._bring_back()
        plans = [self._plan(capture) for capture in captures]
        for _, parts in plans:
            for part in parts:
                part.refresh()
        return plans

    def _run_hooked(
        self,
        call: Call,
        cut: MicroBatches,
        weights: list[float] | None,
        target: torch.device | None,
    ) -> tuple[Any, torch.device]:
        """Run through hooks, micro-batches one after another."""
        if self._clones is not None:
            raise InputError(
                "enable_clone needs a model that can be captured, and this one cannot: "
                f"{self.not_captured_because}; make the flow without enable_clone"
            )
        if self.deferred_batch_norm and self.module.training and len(cut.parts) > 1:
            refuse_uncaptured(self.module, self.not_captured_because)
        self._bring_back()
        began = perf_counter()
        try:
            result = self._through_hooks(call, cut, weights, target)
        except Exception as error:
            if not checkpoints.is_recompute_signal(error):
                self._program.doubt_refusal()
            raise
        self._program.note_passed(perf_counter() - began)
        return result

    def _through_hooks(
        self,
        call: Call,
        cut: MicroBatches,
        weights: list[float] | None,
        target: torch.device | None,
    ) -> tuple[Any, torch.device]:
        assert self._assignment is not None
        if self._hooks.stand and len(cut.parts) == 1:
            return self._hooks.call(self._assignment, *call, target)
        results, structures, after, place = self._hooks.run(self._assignment, cut.parts, target)
        if len(cut.parts) == 1:
            write_back(call, after)
        nests = [
            structure.unflatten(leaves)
            for leaves, structure in zip(results, structures, strict=True)
        ]
        return join(nests, cut.sizes, cut.joining, weights), place

    def compare_capture(self, capture: Capture, part: Part) -> str:
        """Return how the results of a new graph differ from the placed model's.

        Args:
            capture: the graph.
            part: inputs that it holds for.

        Returns:
            A description; an empty string if nothing differs.
        """
        if self._assignment is None or self._clones is not None or self._has_scripts():
            return ""

        def eager(call: Call) -> tuple[Any, Any]:
            assert self._assignment is not None
            (leaves,), (structure,), after, _ = self._hooks.run(
                self._assignment, [self.laid_out(call)], self.output_device
            )
            return structure.unflatten(leaves), after

        def captured(call: Call) -> tuple[Any, Any]:
            tensors = self.laid_out(call).tensors
            (leaves,) = call_captured([self._plan(capture)], [tensors], self.output_device, False)
            result, made = joined([leaves], [capture.exported], [1], Joining())
            if capture.exported.input_changes is not None:
                capture.exported.input_changes.write_back(call, tensors, made)
            return result, call

        self._bring_back()
        return difference(self.module, capture.exported, part, eager, captured)

    def _has_scripts(self) -> bool:
        """Return whether a module allows no hooks."""
        return any(isinstance(child, torch.jit.ScriptModule) for child in self.module.modules())

    def laid_out(self, call: Call, options: BatchOptions | None = None) -> Part:
        """Return the inputs of a call, flattened, with their batch dimensions."""
        raise NotImplementedError

    def _tell_of_edits(self) -> None:
        """Warn where a map was made that nothing follows yet."""
        raise NotImplementedError

    def _bring_back(self) -> None:
        """Move state to its layers again that somebody else moved."""
        raise NotImplementedError

    def _refresh_clones(self) -> None:
        """Bring clones up to date."""
        raise NotImplementedError

    def _plan(self, capture: Capture) -> tuple[LayerGraph, list[Segment]]:
        """Return the segments of a capture under the present map."""
        raise NotImplementedError
