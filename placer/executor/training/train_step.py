"""``TrainStep``, which ``DataFlow.train_step`` returns: passes of one batch, and the optimizer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from placer import devices
from placer.capture import autocast, input_forms
from placer.capture.argument_checks import require_chunks, require_loss_function
from placer.capture.batch_dims.declared_layout import (
    other_dims,
    refuse_absent_outputs,
    require_batch_options,
    spelt_target,
)
from placer.capture.loss_functions import (
    LossFunction,
    refuse_arrays,
    require_gradient,
    require_real_number,
)
from placer.capture.pytrees import detached_nest
from placer.errors import BatchError, InputError, StageError
from placer.executor.engine.compiled_segments import Backend
from placer.executor.engine.fill_drain import to_device_nest
from placer.executor.engine.shares import part_sizes
from placer.executor.output_joining import Joining, join
from placer.executor.placed_calls import PlacedCalls
from placer.executor.placed_model import PlacedModel
from placer.executor.settings import Settings
from placer.executor.stage_errors import Place, failed_module, nothing_held, raise_explained
from placer.executor.state.batch_statistics import refuse_uncaptured
from placer.executor.state.parameter_hooks import hooks_run_once
from placer.executor.state.replication import Replication
from placer.executor.training.ddp_check import refuse_data_parallel
from placer.executor.training.input_gradients import detached, hand_out
from placer.executor.training.loss.label_weights import LabelWatch
from placer.executor.training.loss.loss_check import LossChecks
from placer.executor.training.loss.loss_weights import Weighing, merged
from placer.executor.training.optimizer.optimizer_update import Update
from placer.executor.training.optimizer.shared_optimizers import Others, kept, note_waiting
from placer.executor.training.pipeline_cache import Pipelines, room_of, tell_in_turn
from placer.executor.training.stages.training_slot import Collected
from placer.executor.training.stages.training_stage import LOSS
from placer.executor.training.stages.weight_aliases import Keep
from placer.executor.training.step_rollback import Kept
from placer.executor.training.training_batch import Batch
from placer.executor.training.training_pipeline import SCHEDULES, Order, TrainingPipeline
from placer.schema import BatchOptions
from placer.schema.options import Weigh
from placer.utils.option_checks import require_flags
from placer.utils.user_warnings import warn


class TrainStep:
    """A training step of a flow.

    Args:
        placed: the model.
        settings: of the flow.
        calls: of the model, for micro-batches that run one by one.
        loss_fn: ``loss_fn(output, target)``: the loss, or the loss and a dict of further values.
        update: what follows the gradients.
        schedule: the order of micro-batches.
        compile: the backend of torch.compile; None to compile nothing.
        options: of the batch; the flow's present ones if None.
        weigh: ``BatchOptions.weigh``, where it is given apart.

    Raises:
        InputError: the loss is not a function, or has parameters of its own; the schedule is not
            known; the optimizer is of another model; or DistributedDataParallel is around the model
            or in it.
    """

    def __init__(
        self,
        placed: PlacedModel,
        settings: Settings,
        calls: PlacedCalls,
        loss_fn: LossFunction,
        update: Update,
        schedule: Order,
        compile: Backend | None = None,
        options: BatchOptions | None = None,
        weigh: Weigh | None = None,
    ) -> None:
        require_loss_function(loss_fn)
        options = settings.batch_options if options is None else options
        require_batch_options(options)
        if schedule not in SCHEDULES:
            raise InputError(
                f"schedule {schedule!r} is not known; give one of {', '.join(SCHEDULES)}"
            )
        refuse_data_parallel(placed.module)
        self._others = Others(update, placed.module)
        self.placed = placed
        self._settings = settings
        self._calls = calls
        self.loss_fn = Weighing(loss_fn, merged(options, weigh))
        self.update = update
        self.schedule = schedule
        self.compile = compile
        self._pipelines = self._no_pipelines()
        self._checks = LossChecks(self.loss_fn)
        self._has_told = False
        self._has_named_outputs = isinstance(options.outputs, dict) and bool(options.outputs)

    def __call__(
        self,
        inputs: Any,
        target: Any = None,
        chunks: int | None = None,
        update: bool = True,
        outputs: bool = False,
    ) -> Any:
        """Train on one batch; then every parameter's ``grad`` is the gradient of the batch's loss.

        Args:
            inputs: one tensor, a tuple of positional or a dict of keyword arguments, the batch
                first. Inputs that require a gradient are given theirs, and the graph before them,
                as by the unsplit model.
            target: what the loss compares with, the batch first; likewise. None if the inputs have
                it.
            chunks: micro-batches; the placement's number if None. If the batch does not divide, the
                last micro-batch is smaller, and its loss counts by its size. It is at least half as
                large as the others, or there are fewer.
            update: False lets the gradients wait. The next call, also of another step of the flow,
                adds its own to them. The first call with ``update=True`` steps the optimizer.
                ``optimizer.zero_grad()`` drops them.
            outputs: whether to return the model's result for the batch as well, on
                ``flow.output_device``.

        Returns:
            The loss, detached. If ``loss_fn`` gives further values, a tuple of the loss and these
            values, joined over the micro-batches. With ``outputs`` the model's result stands at the
            end of the tuple.

        Raises:
            BatchError: micro-batches give another result or loss than the batch; nothing was
                trained then.
            InputError: the flow is not placed yet, or keeps clones, or its module is in eval mode,
                or the target is of another size than the batch, or ``update`` or ``flow.in_flight``
                is invalid.
        """
        require_flags(update=update, outputs=outputs)
        with nothing_held(), self.placed.lock:
            batch = self._taken(inputs, target, chunks)
            for optimizer in self.update.optimizers:
                self.placed.weights.follow(optimizer, self.update.is_on_host)
            keep, self.placed.gradients_wait = kept(self.placed, self.placed.gradients_wait), False
            try:
                result = self._computed(batch, keep, outputs)
            except _LabelsSeen:
                batch = self._taken(inputs, target, chunks)
                result = self._computed(batch, keep, outputs)
            if len(batch.sizes) > 1:
                self.loss_fn.tell_of_labels(batch.spelt())
            self.placed.gradients_wait = not update
            if update:
                self.update(self.placed.module)
                self._others.wait_no_longer()
            else:
                note_waiting(self.placed)
            return result

    def _computed(self, batch: Batch, keep: Keep, outputs: bool) -> Any:
        """Return what the step returns; gradients are in place then, and gone where it fails."""
        if not self._checks.wants(batch):
            return self._attempted(batch, keep, outputs, is_compared=False)
        try:
            return self._attempted(batch, keep, outputs, is_compared=True)
        except torch.OutOfMemoryError as error:
            # gradients of earlier steps waited, and are gone
            if any(map(keep, self.placed.module.parameters())):
                raise
            why = str(error)
        self._has_named_outputs = False  # the names are not looked for in results either
        self._checks.leave_out(batch)
        devices.release_cache()
        warn(
            "the loss of micro-batches was not compared with the whole batch's: "
            f"out of memory: {why}"
        )
        return self._attempted(batch, keep, outputs, is_compared=False)

    def _attempted(self, batch: Batch, keep: Keep, outputs: bool, is_compared: bool) -> Any:
        pipeline, collects = None, is_compared or self._has_named_outputs
        try:
            pipeline = self._pipelines.ready(
                batch, outputs, collects, partial(self._has_waiting, keep)
            )
            self._others.look(pipeline)
            self._others.drop_gradients(keep)
            if pipeline is None:
                loss, made = self._through_hooks(batch, keep, outputs or collects)
            else:
                scale = self.update.scale(pipeline.loss_device)
                loss = pipeline.run(batch.tensors, batch.goals.leaves, keep, scale)
                # the pipeline may have needed parts of equal sizes
                batch = replace(batch, sizes=list(pipeline.sizes))
                made = [
                    (self._unflattened(pipeline, one), one.values) for one in pipeline.collected
                ]
                if pipeline.pipelines > 1:
                    made = [to_device_nest(one, pipeline.loss_device) for one in made]
            if self._has_named_outputs:
                refuse_absent_outputs(self.loss_fn.options, *made[0])
                self._has_named_outputs = False
            joining = (
                self._compared(batch, pipeline, loss, made, keep)
                if is_compared
                else self._checks.known(batch)
            )
        except BaseException as error:
            self.placed.module.zero_grad()
            self._pipelines.let_go(None if isinstance(error, Exception) else pipeline)
            advice = _target_advice(error, batch, self.loss_fn.options)
            if not advice:
                raise
            failure = cast(StageError, error)
            text = f"{failure}; {advice}"
            raise StageError(
                text, failure.device, failure.layer, failure.batch
            ) from failure.__cause__
        return self._returned(batch, loss, made, joining, outputs)

    def _compared(
        self,
        batch: Batch,
        pipeline: TrainingPipeline | None,
        loss: Tensor,
        made: list[Any],
        keep: Keep,
    ) -> Joining:
        """Compare the loss with the whole batch's.

        Returns:
            How the loss's further values are joined.
        """
        labels = LabelWatch()
        try:
            return self._checks.joining(batch, loss, made, labels)
        except BatchError as error:
            if pipeline is not None:
                pipeline.recover()
            waits = any(map(keep, self.placed.module.parameters()))
            # else gradients of earlier steps would be gone
            if labels.found is not None and not waits:
                raise _LabelsSeen from error
            raise
        finally:
            if labels.found is not None:
                self.loss_fn.weigh_by(labels.found)
                self._pipelines = self._no_pipelines()

    def _returned(
        self, batch: Batch, loss: Tensor, made: list[Any], joining: Joining, outputs: bool
    ) -> Any:
        found: list[Any] = [loss]
        values = [values for _, values in made]
        if not outputs and not any(values):
            return loss
        weights = self.loss_fn.means(batch.goals, batch.sizes)
        if any(values):
            found.append(join(values, batch.sizes, joining, weights))
        if outputs:
            nests = [to_device_nest(result, self._settings.output_device) for result, _ in made]
            found.append(join(nests, batch.sizes, batch.joining, weights))
        return tuple(found)

    def _has_waiting(self, keep: Keep) -> bool:
        """Return whether there are gradients that the next batch adds to."""
        return any(
            parameter.grad is not None and keep(parameter)
            for parameter in self.placed.module.parameters()
        )

    @staticmethod
    def _unflattened(pipeline: TrainingPipeline, collected: Collected) -> Any:
        return (
            None
            if collected.outputs is None
            else pipeline.recipe.outputs.unflatten(collected.outputs)
        )

    def pipeline(
        self, inputs: Any, target: Any, chunks: int | None = None
    ) -> tuple[TrainingPipeline | None, list[Any], list[Any]]:
        """Return the stages for a batch like this, without running them.

        Args:
            inputs: as for a step.
            target: as for a step.
            chunks: as for a step.

        Returns:
            The stages, None where the model runs through hooks; and the flattened inputs and
            target.
        """
        batch = self._taken(inputs, target, chunks).without_gradients()
        return self._pipelines.pipeline_for(batch, needed=True), batch.tensors, batch.goals.leaves

    def _taken(self, inputs: Any, target: Any, chunks: int | None) -> Batch:
        """Return inputs and target, flattened, and how they are cut into micro-batches."""
        self._refuse()
        call = input_forms.call_arguments(inputs)
        refuse_arrays(target)
        wanted = self._settings.chunks if chunks is None else chunks
        sizes_of = partial(_sizes, self._settings.replication, wanted)
        cut = self._calls.cut(
            call, self.loss_fn.options, sizes_of, partial(self.loss_fn.weights, inputs, target)
        )
        _refuse_no_batch(inputs, cut.tensors, cut.layout.size)
        goals = self.loss_fn.goals(inputs, target, cut.layout.size, len(cut.sizes) > 1)
        self._others.refuse_nothing_stepped([*cut.tensors, *goals.leaves])
        dims = cut.parts[0].dims if not cut.layout.lists else cut.layout.dims
        batch = Batch(
            cut.tensors, cut.inputs, cut.layout, dims, goals, cut.sizes, cut.joining, cut.parameters
        )
        return batch if torch.is_grad_enabled() else batch.without_gradients()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the passes, which are made again when needed."""
        return {**self.__dict__, "_pipelines": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pipelines = self._no_pipelines()

    def _no_pipelines(self) -> Pipelines:
        return Pipelines(self.placed, self._settings, self.loss_fn, self.schedule, self.compile)

    @property
    def pipelines(self) -> list[TrainingPipeline]:
        """What batches went through, one for each shape that is kept, the latest last."""
        return list(self._pipelines)

    @property
    def not_recorded_because(self) -> dict[str, str]:
        """By segment on a GPU without CUDA graphs: the layer that forbids them, and why."""
        return self._notes("not_recorded_because")

    @property
    def compiled(self) -> dict[str, str]:
        """By segment that torch.compile made faster: by how much, as measured."""
        return self._notes("compiled")

    @property
    def not_compiled_because(self) -> dict[str, str]:
        """By segment that runs without torch.compile though asked for: why."""
        return self._notes("not_compiled_because")

    def _notes(self, attribute: str) -> dict[str, str]:
        notes: dict[str, str] = {}
        for pipeline in self._pipelines:
            notes |= pipeline.engine.notes(attribute)
        return notes

    def _refuse(self) -> None:
        placed = self.placed
        if placed.assignment is None:
            raise InputError(
                "the flow is not placed yet: call update_flow() before a training step"
            )
        if placed.weights.clones is not None:
            raise InputError(
                "clones are not trained: make the flow without enable_clone to train it"
            )
        if torch.is_inference_mode_enabled():
            raise InputError(
                "inference mode makes no gradients: leave torch.inference_mode() for a step"
            )
        if not placed.module.training:
            raise InputError("the model is in eval mode: call flow.train() before a training step")
        room_of(self._settings.in_flight)
        refuse_data_parallel(placed.module)

    @torch.enable_grad()
    def _through_hooks(self, batch: Batch, keep: Keep, outputs: bool) -> tuple[Tensor, list[Any]]:
        """Run the micro-batches of a model that could not be captured one after another.

        Returns:
            The loss, and by micro-batch the model's result, if that is asked for, and the further
            values of the loss.
        """
        module = self.placed.module
        if self._settings.deferred_batch_norm and len(batch.sizes) > 1:
            why = self.placed.not_captured_because or "micro-batches run in turn"
            refuse_uncaptured(module, why)
        before = Kept(
            module.buffers(), {devices.location(tensor) for tensor in module.parameters()}
        )
        before.save()
        for parameter in module.parameters():
            if not keep(parameter):
                parameter.grad = None
        losses: list[Tensor] = []
        made: list[Any] = []
        in_loss: torch.device | None = None  # where it runs, as long as it does
        given = [*batch.tensors, *batch.goals.leaves]
        leaves = detached(given)
        try:
            with hooks_run_once(module.parameters() if len(batch.sizes) > 1 else ()):
                for ((args, kwargs), goal), share in zip(
                    batch.parts(leaves), self.loss_fn.shares(batch.sizes), strict=True
                ):
                    output, place = self._calls.run_for_loss(args, kwargs)
                    # Only after a call: if the model fails on its inputs, that error comes first.
                    self._tell_once()
                    in_loss = place
                    # "cuda" in loss_fn means this device, as in a pipeline
                    with devices.Lane(place, caller=True):
                        loss, values = self.loss_fn(output, to_device_nest(goal, place))
                    require_real_number(loss)
                    require_gradient(loss)
                    in_loss = None
                    made.append((detached_nest(output) if outputs else None, detached_nest(values)))
                    loss = loss * share
                    scale = self.update.scale(devices.location(loss))
                    with autocast.disabled(place):
                        loss.backward(None if scale is None else scale.to(loss.dtype))  # type: ignore[no-untyped-call]
                    losses.append(loss.detach())
            hand_out(given, [leaf.grad if isinstance(leaf, Tensor) else None for leaf in leaves])
        except BaseException as error:
            before.restore()
            raise_explained(error, self._place(error, len(losses), in_loss))
        # a module that branches may end on another device each time
        place = devices.location(losses[-1])
        return torch.stack([devices.move(loss, place) for loss in losses]).sum(), made

    def _tell_once(self) -> None:
        """Warn, once, why the model runs through hooks."""
        if self.placed.not_captured_because and not self._has_told:
            self._has_told = True
            tell_in_turn(f"the model is not captured: {self.placed.not_captured_because}")

    def _place(self, error: BaseException, micro_batch: int, in_loss: torch.device | None) -> Place:
        """Return where a micro-batch failed on its way through hooks, or in its loss.

        The loss runs on ``in_loss``.
        """
        layer = failed_module(error, self.placed.module)
        if layer is None and in_loss is not None:
            return Place(micro_batch, "training", 0, 0, in_loss, LOSS)
        assignment = self.placed.assignment
        device = assignment.of_path(layer) if assignment is not None and layer else None
        return Place(micro_batch, "training", 0, 0, device or self._settings.output_device, layer)


def _target_advice(error: BaseException, batch: Batch, options: BatchOptions) -> str:
    """Return what to do about the target, if its loss failed and it may be the reason."""
    if type(error) is not StageError or error.layer != LOSS:
        return ""
    goals = batch.goals
    if not goals.leaves:
        return (
            f"loss_fn(output, target) got the target {goals.structure.unflatten([])!r}; if it "
            "needs another one, call step(inputs, target)"
        )
    others = other_dims(goals.leaves, goals.layout) if len(batch.sizes) > 1 else []
    if not others:
        return ""
    declaration = spelt_target(options, goals.layout, *others[0])
    return (
        f"micro-batches cut {goals.layout.description()}; if its samples lie elsewhere, give "
        f"{declaration}"
    )


class _LabelsSeen(Exception):
    """The loss turned out to count its labels.

    The step is to run again, with samples weighed by these.
    """


def _refuse_no_batch(inputs: Any, tensors: list[Any], size: int) -> None:
    input_forms.require_tensors(inputs, tensors)
    if not size:
        raise InputError("the batch has no samples: leave empty batches out")


def _sizes(replication: Replication, wanted: int, size: int) -> list[int]:
    """Return the sizes of micro-batches, or of their parts for several pipelines."""
    require_chunks(wanted)
    return part_sizes(replication, wanted, size)
