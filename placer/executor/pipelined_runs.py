"""The runs of a placed flow that keep every device at work: training steps and streams."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import nn

from placer.capture.argument_checks import require_chunks, require_samples_for_chunks
from placer.capture.batch_dims.declared_layout import input_layout, require_batch_options
from placer.capture.loss_functions import LossFunction
from placer.errors import InputError, kind_of
from placer.executor.engine.compiled_segments import Backend, backend_of
from placer.executor.engine.slot import Slot
from placer.executor.engine.stage import Stage
from placer.executor.inference.stream import Known, Streams
from placer.executor.measure import MeasuredFlow, measure_step, measure_stream
from placer.executor.state.state_moves import bring_state
from placer.executor.training.optimizer.optimizer_memory import warn_of_other_memory
from placer.executor.training.optimizer.optimizer_update import Optimizers, Update
from placer.executor.training.train_step import Flow, TrainStep
from placer.executor.training.training_pipeline import Order
from placer.report.timeline import Measurement
from placer.schema import BatchOptions, Placement, Profile, Schedule
from placer.schema.batch_options import Weigh


class PipelinedRuns(nn.Module):
    """The part of a ``DataFlow`` that keeps every device at work on another micro-batch or batch.

    Attributes:
        chunks: micro-batches that a batch is cut into.
        batch_options: what is declared of batches.
        schedule: the order of micro-batches in training.
    """

    chunks: int
    batch_options: BatchOptions
    schedule: Schedule
    _streams: Streams
    _optimizers: WeakSet[torch.optim.Optimizer]
    _assumed: Placement | None

    def train_step(
        self,
        loss_fn: LossFunction,
        optimizer: Optimizers = None,
        schedule: Order | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        max_norm: float | None = None,
        compile: bool | Backend = False,
        weigh: Weigh | None = None,
        batch_options: BatchOptions | None = None,
    ) -> TrainStep:
        """Return a training step of the whole pipeline: forwards, backwards, and the optimizer.

        Args:
            loss_fn: ``loss_fn(output, target)``, a mean over the samples that it is given unless
                ``batch_options`` say otherwise; or a tuple of that and a dict of further values,
                ``(loss, {"accuracy": accuracy})``. It runs on the device of the last layer, where
                tensors of its own belong; its buffers are brought there. It becomes a part of the
                passes when they are made: what changes from step to step, such as a weight, has to
                be in the target. For another loss make another step.
            optimizer: any of torch's whose ``step`` needs no closure, stepped after every batch, or
                a list of them, stepped in its order; None to leave that to the caller, who finds
                the gradients in place. Their state moves with the parameters, wherever the flow
                moves these. A warning says so where it needs other memory than the placement
                assumed.
            schedule: the order of micro-batches; the placement's if None. ``"zero-bubble"``
                computes weight gradients apart, while a device would wait. Where a device holds
                several segments, ``"interleaved"`` runs them in turn, and all others are
                fill-drain.
            scaler: for training in float16: scales the loss, and skips the step where a gradient
                overflowed on any device.
            max_norm: clip the gradients to this norm over all parameters on all devices.
            compile: let torch.compile make one function of each segment, and one of the loss, where
                that is faster. ``step.compiled`` then says what it gained and
                ``step.not_compiled_because`` why it did not. True, or a backend.
            weigh: ``weigh(inputs, target)``, the weight of each sample of a batch in the loss,
                shape ``(N,)``: its number of labels, for instance, where the loss is a mean over
                these. The same as ``BatchOptions(weigh=...)``. ``nn.CrossEntropyLoss`` and
                ``nn.NLLLoss`` need none: the labels that they count are weighed.
            batch_options: where the samples of the batch lie, whether the loss is a mean or a sum,
                how results are joined; the flow's own if None.

        Returns:
            ``step(inputs, target) -> loss``, the loss of the batch, on the device of the last
            layer. ``inputs`` is one tensor, a tuple of positional or a dict of keyword arguments.
            With ``update=False`` a step leaves its gradients to the next one; with ``outputs=True``
            it returns the model's result as well.

        Raises:
            InputError: an argument cannot be used; the message says which, and what can.
        """
        update = Update(optimizer, scaler, max_norm)
        order = self.schedule if schedule is None else schedule
        step = TrainStep(
            cast(Flow, self), loss_fn, update, order, backend_of(compile), batch_options, weigh
        )
        flow = step.flow
        if self._assumed is not None and flow.assignment is not None:
            warn_of_other_memory(
                self._assumed, update.optimizers, flow.module, flow.assignment.of_state
            )
        return step

    def follow(self, optimizer: Any) -> None:
        """Keep an optimizer's state on the devices of its parameters, from now on.

        Args:
            optimizer: one that is not torch's, and so has no known state, is left alone.
        """
        if isinstance(optimizer, torch.optim.Optimizer) and optimizer not in self._optimizers:
            bring_state(optimizer)
            self._optimizers.add(optimizer)

    @property
    def compiled(self) -> dict[str, str]:
        """By segment that torch.compile made faster in a stream: by how much."""
        return {place: gain for place, (gain, _) in self._streams.compiling().items() if gain}

    @property
    def not_compiled_because(self) -> dict[str, str]:
        """By segment that a stream runs without torch.compile though it was asked for: why."""
        return {place: why for place, (_, why) in self._streams.compiling().items() if why}

    def stream(
        self,
        batches: Iterable[Any],
        in_flight: int | None = None,
        *,
        compile: bool | Backend = False,
        batch_options: BatchOptions | None = None,
    ) -> Generator[Any, None, None]:
        """Run batch after batch without gradients, each behind the others through the devices.

        A batch enters the first device while earlier ones are in later devices. Do not change the
        model or its map while a stream is open; close it, or exhaust it, before.

        Args:
            batches: an iterable of batches, each one tensor, a tuple or list of positional, or a
                dict of keyword arguments. Their shapes may differ; a shape is recorded as CUDA
                graphs when it comes for the second time.
            in_flight: batches that are taken from the source before the first result is handed out,
                and so the most that take memory; two more than there are segments if None. 1 takes
                none ahead.
            compile: let torch.compile make one function of each segment, where that is faster, when
                a shape comes for the second time. ``flow.compiled`` then says what it gained and
                ``flow.not_compiled_because`` why it did not. True, or a backend, the same one each
                time. The latest eight shapes are kept, and one that comes back later is compiled
                again. Layers that draw random numbers draw others than without it.
            batch_options: where the samples of a batch lie, so that batches of other sizes need no
                capture of their own; the flow's if None. Batches are not cut.

        Returns:
            A generator of the model's result for each batch, in their order, on ``output_device``.

        Raises:
            InputError: these are not batches, ``in_flight`` is not a count, or torch has no such
                backend.
            StageError: from the generator, when it comes to a batch on which a layer failed;
                results before are whole.
        """
        return self._streams.open(batches, in_flight, backend_of(compile), batch_options)

    def streamed(self, batch: Known) -> list[Stage[Slot]]:
        """Return the stages of a stream over batches like this one, recorded if they can be."""
        return self._streams.stages(batch)

    def measure(
        self,
        inputs: Any,
        target: Any = None,
        *,
        step: TrainStep | None = None,
        chunks: int | None = None,
        profile: Profile | None = None,
        compile: bool | Backend = False,
        batch_options: BatchOptions | None = None,
    ) -> Measurement:
        """Measure when each device works on which micro-batch, to compare with the prediction.

        It runs the batch three times and changes nothing but gradients: the optimizer does not
        step, and buffers are restored.

        Args:
            inputs: a batch: one tensor, a tuple of positional or a dict of keyword arguments.
            target: the target of a training step; None where its loss needs none.
            step: from ``train_step``: its forward and backward passes are measured. None measures
                inference, the micro-batches streamed.
            chunks: micro-batches; the placement's number if None.
            profile: what the placement was solved from, for the prediction; None for no prediction.
            compile: in inference, as for ``stream``; a step has its own.
            batch_options: in inference, where the samples of the batch lie; the flow's if None. A
                step has its own.

        Returns:
            The timelines, with ``table()`` and ``save_trace(path)``; ``rows`` has every pass.

        Raises:
            InputError: the flow is not placed; the model runs through hooks; the profile is of
                other layers; there is a target without a step; ``step`` is not a step of this flow;
                ``chunks`` is more than the samples; or torch has no such backend.
        """
        if step is None and target is not None:
            raise InputError(
                "to measure a training step give its target and step=; for inference, neither"
            )
        is_asked = chunks is not None
        chunks = self.chunks if chunks is None else chunks
        require_chunks(chunks)
        if profile is not None and not isinstance(profile, Profile):
            raise InputError(
                f"profile is {kind_of(profile)}; give the Profile, such as profile() returned"
            )
        if step is not None:
            _require_step_of(step, self)
        backend = backend_of(compile)
        if step is not None:
            _refuse_step_options(compile, backend, batch_options)
        options = self.batch_options if batch_options is None else batch_options
        require_batch_options(options)
        samples = input_layout(
            cast(nn.Module, self.module), inputs, options if step is None else step.loss_fn.options
        ).size
        if is_asked:
            require_samples_for_chunks(chunks, samples)
        if step is not None:
            return measure_step(step, inputs, target, chunks, profile)
        return measure_stream(
            cast(MeasuredFlow, self), self._streams, inputs, chunks, options, profile, backend
        )


def _require_step_of(step: Any, flow: Any) -> None:
    if not isinstance(step, TrainStep):
        raise InputError(f"step is {kind_of(step)}; give what this flow's train_step(...) returned")
    if cast(Any, step.flow) is not flow:
        raise InputError("step is one of another flow; give one that this flow's train_step made")


def _refuse_step_options(
    compile: bool | Backend, backend: Backend | None, batch_options: BatchOptions | None
) -> None:
    """Raise an InputError if ``measure`` was given options that the step has already."""
    if backend is not None:
        raise InputError(
            f"compile={compile!r} with step=: a step runs as train_step(compile=...) made it; "
            "leave it out here"
        )
    if batch_options is not None:
        raise InputError(
            "batch_options with step=: a step has the options that train_step was given; "
            "leave them out here"
        )
