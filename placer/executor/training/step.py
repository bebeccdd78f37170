"""What ``DataFlow.train_step`` returns: one batch at a time, forwards, backwards and the optimizer."""

from __future__ import annotations

from threading import RLock
from typing import Any, Protocol

import torch
from torch import Tensor

from placer import devices
from placer.errors import InputError
from placer.executor.compiled_segments import Backend
from placer.executor.faults import Place, failed_module, nothing_held, raise_explained
from placer.executor.pipeline import cut, micro_batch_sizes, tell_lists
from placer.executor.state.statistics import refuse_uncaptured
from placer.executor.training.batch import Batch
from placer.executor.training.input_gradients import detached, hand_out
from placer.executor.training.kept import Kept
from placer.executor.training.pipeline import SCHEDULES, Order, TrainingPipeline
from placer.executor.training.pipelines import Pipelines, Placed, room_of, tell_in_turn
from placer.executor.training.shared_optimizers import Others, kept, note_waiting
from placer.executor.training.update import Update
from placer.executor.training.weighing import Weigh, Weighing
from placer.executor.training.weights import Keep
from placer.graph import arguments, autocast
from placer.graph.batch import batch_size
from placer.graph.given import refuse_no_chunks, refuse_no_loss, refuse_sum
from placer.graph.losses import LossFunction, refuse_arrays, refuse_no_number, refuse_other_batch, refuse_untrained
from placer.graph.structure import flatten, flatten_inputs


class Flow(Placed, Protocol):
    """What a training step needs of a ``DataFlow``."""

    chunks: int
    enable_clone: bool
    gradients_wait: bool
    output_device: torch.device
    lock: RLock

    @property
    def not_captured_because(self) -> str:
        """Why the model runs through hooks; empty where it does not."""

    def follow(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Keep what an optimizer has for parameters where these are, from now on."""

    def __call__(self, *args: Any, chunks: int | None = None, **kwargs: Any) -> Any:
        """Run the model."""


class TrainStep:
    """A training step of a flow.

    Args:
        flow: a flow to which ``update_flow`` has been called.
        loss_fn: ``loss_fn(output, target)``, a mean over the samples that it is given.
        update: what follows the gradients.
        schedule: the order of micro-batches.
        compile: the backend of torch.compile; None to compile nothing.
        weigh: what samples weigh in the loss; see ``weighing``.

    Raises:
        InputError: the loss is no function, or has parameters of its own; the schedule is not known; or the optimizer
            is of another model.
    """

    def __init__(
        self,
        flow: Flow,
        loss_fn: LossFunction,
        update: Update,
        schedule: Order,
        compile: Backend | None = None,
        weigh: Weigh | None = None,
    ) -> None:
        refuse_no_loss(loss_fn)
        refuse_sum(loss_fn)
        if schedule not in SCHEDULES:
            raise InputError(f"schedule {schedule!r} is not known; give one of {', '.join(SCHEDULES)}")
        self._others = Others(update, flow.module)
        self.flow = flow
        self.loss_fn = Weighing(loss_fn, weigh)
        self.update = update
        self.schedule = schedule
        self.compile = compile
        self._pipelines = self._no_pipelines()
        self._has_told = False

    def __call__(self, inputs: Any, target: Any = None, chunks: int | None = None, update: bool = True) -> Tensor:
        """Train on one batch; afterwards every parameter's ``grad`` is that of the mean loss.

        Args:
            inputs: one tensor, a tuple of positional or a dict of keyword arguments, the batch first. Those that
                require a gradient are given theirs, and what they were made of, as by the unsplit model.
            target: what the loss compares with, the batch first; likewise. None where the inputs have it.
            chunks: micro-batches; what the placement says if None. Where the batch does not divide, the last one is
                smaller, and its loss counts by its size; if it were less than half as large, there are fewer.
            update: False lets the gradients wait: the next call, also of another step of the flow, adds its own to
                them, and the optimizer is stepped by the first call that does not say so. ``optimizer.zero_grad()``
                drops them.

        Returns:
            The mean loss, detached.

        Raises:
            InputError: the flow is not placed yet, or keeps clones, or its module is in eval mode, or the target is of
                another size than the batch, or ``update`` or ``flow.in_flight`` is not what it can be.
        """
        if update not in (True, False):
            raise InputError(f"update is {update!r}; give True, or False to let the gradients wait")
        with nothing_held(), self.flow.lock:
            batch = self._taken(inputs, target, chunks)
            self.flow.follow(self.update.optimizer)
            keep, self.flow.gradients_wait = kept(self.flow, self.flow.gradients_wait), False
            loss = self._computed(batch, keep)
            self.flow.gradients_wait = not update
            if update:
                self.update(self.flow.module)
                self._others.wait_no_longer()
            else:
                note_waiting(self.flow)
            return loss

    def _computed(self, batch: Batch, keep: Keep) -> Tensor:
        """The loss of a batch; gradients are in place then, and gone where it fails."""
        pipeline = None
        try:
            pipeline = self._pipelines.ready(batch)
            self._others.look(pipeline)
            self._others.drop_gradients(keep)
            if pipeline is None:
                return self._through_hooks(batch, keep)
            return pipeline.run(batch.tensors, batch.goals, keep, self.update.scale(pipeline.stages[-1].device))
        except BaseException as error:
            self.flow.module.zero_grad()
            self._pipelines.let_go(None if isinstance(error, Exception) else pipeline)
            raise

    def pipeline(
        self, inputs: Any, target: Any, chunks: int | None = None
    ) -> tuple[TrainingPipeline | None, list[Any], list[Any]]:
        """What a batch like this goes through, without running it.

        Args:
            inputs: as for a step.
            target: as for a step.
            chunks: as for a step.

        Returns:
            The stages, None where the model runs through hooks; and the flattened inputs and target.
        """
        batch = self._taken(inputs, target, chunks).without_gradients()
        return self._pipelines.of(batch, needed=True), batch.tensors, batch.goals

    def _taken(self, inputs: Any, target: Any, chunks: int | None) -> Batch:
        """Inputs and target, flattened and with their structures, and the sizes of micro-batches."""
        self._refuse()
        tensors, structure = flatten_inputs(*arguments.split(inputs))
        goals, target_structure = flatten(target)
        size = batch_size(tensors)
        _refuse_no_batch(inputs, tensors, size)
        refuse_arrays(target)
        self._others.refuse_nothing_stepped([*tensors, *goals])
        sizes = _sizes(self.flow.chunks if chunks is None else chunks, size)
        if len(sizes) > 1 or isinstance(target, Tensor):  # of several, boxes say, each may have a length of its own
            refuse_other_batch(
                goals, size, "its first dimension must be the batch; with chunks=1 a dict or list may differ"
            )
        if len(sizes) > 1:
            tell_lists((inputs, target), size)
            goals, target_structure = self.loss_fn.with_weights(inputs, target, tensors, size)
        batch = Batch(tensors, structure, goals, target_structure, sizes)
        return batch if torch.is_grad_enabled() else batch.without_gradients()

    def __getstate__(self) -> dict[str, Any]:
        """Without the passes, which are made again when needed."""
        return {**self.__dict__, "_pipelines": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pipelines = self._no_pipelines()

    def _no_pipelines(self) -> Pipelines:
        return Pipelines(self.flow, self.loss_fn, self.schedule, self.compile)

    @property
    def pipelines(self) -> list[TrainingPipeline]:
        """What batches went through so far: one for each shape that is kept, the latest used last."""
        return list(self._pipelines)

    @property
    def not_recorded_because(self) -> dict[str, str]:
        """For each segment on a GPU that runs without CUDA graphs: which layer does not allow them, and why."""
        return {place: why for item in self._pipelines for place, why in item.not_recorded_because.items()}

    @property
    def compiled(self) -> dict[str, str]:
        """For each segment that torch.compile made faster: by how much, as measured."""
        return {place: gain for item in self._pipelines for place, gain in item.compiled.items()}

    @property
    def not_compiled_because(self) -> dict[str, str]:
        """For each segment that runs without torch.compile though it was asked for: why."""
        return {place: why for item in self._pipelines for place, why in item.not_compiled_because.items()}

    def _refuse(self) -> None:
        flow = self.flow
        if flow.assignment is None:
            raise InputError("the flow is not placed yet: call update_flow() before a training step")
        if flow.enable_clone:
            raise InputError("clones are not trained: make the flow without enable_clone to train it")
        if torch.is_inference_mode_enabled():
            raise InputError("inference mode makes no gradients: leave torch.inference_mode() for a training step")
        if not flow.module.training:
            raise InputError("the model is in eval mode: call flow.train() before a training step")
        room_of(flow.in_flight)

    @torch.enable_grad()
    def _through_hooks(self, batch: Batch, keep: Keep) -> Tensor:
        """A model that could not be captured: micro-batches one after another."""
        module, place = self.flow.module, self.flow.output_device
        tensors, inputs, goals, target, sizes = batch
        if self.flow.deferred_batch_norm and len(sizes) > 1:
            refuse_uncaptured(module, self.flow.not_captured_because or "micro-batches run in turn")
        before = Kept(module.buffers(), {devices.location(tensor) for tensor in module.parameters()})
        before.save()
        for parameter in module.parameters():
            if not keep(parameter):
                parameter.grad = None
        losses: list[Tensor] = []
        given = [*tensors, *goals]
        leaves = detached(given)
        of_inputs, of_target = leaves[: len(tensors)], leaves[len(tensors) :]
        parts = zip(cut(of_inputs, sizes, self._pipelines.whole(batch)), cut(of_target, sizes), sizes, strict=True)
        try:
            for part, goal, size in parts:
                args, kwargs = inputs.unflatten(part)
                output = self.flow(*args, chunks=1, **kwargs)
                self._tell_once()  # only now: where the model itself fails on its inputs, that is what is told
                there = [devices.move(leaf, place) if isinstance(leaf, Tensor) else leaf for leaf in goal]
                loss = self.loss_fn(output, target.unflatten(there))
                refuse_no_number(loss)
                refuse_untrained(loss)
                loss = loss * (size / sum(sizes))
                scale = self.update.scale(devices.location(loss))
                with autocast.off(place):
                    loss.backward(None if scale is None else scale.to(loss.dtype))  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
            hand_out(given, [leaf.grad if isinstance(leaf, Tensor) else None for leaf in leaves])
        except BaseException as error:
            before.restore()
            raise_explained(error, self._place(error, len(losses)))
        return torch.stack(losses).sum()

    def _tell_once(self) -> None:
        """Say why the model runs through hooks, the first time that it does."""
        if self.flow.not_captured_because and not self._has_told:
            self._has_told = True
            tell_in_turn(f"the model is not captured: {self.flow.not_captured_because}")

    def _place(self, error: BaseException, micro_batch: int) -> Place:
        """Where a micro-batch failed on its way through hooks."""
        layer = failed_module(error, self.flow.module)
        assignment = self.flow.assignment
        device = assignment.of_path(layer) if assignment is not None and layer else None
        return Place(micro_batch, "training", 0, 0, device or self.flow.output_device, layer)


def _refuse_no_batch(inputs: Any, tensors: list[Any], size: int) -> None:
    arguments.refuse_no_tensor(inputs, tensors)
    if not size:
        raise InputError("the batch has no samples: leave empty batches out")


def _sizes(wanted: int, size: int) -> list[int]:
    """Of the micro-batches."""
    refuse_no_chunks(wanted)
    return micro_batch_sizes(size, wanted)
