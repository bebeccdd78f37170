"""What ``DataFlow.train_step`` returns: one batch at a time, forwards, backwards and the optimizer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from threading import RLock
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from placer import devices
from placer.errors import InputError, kind_of
from placer.executor.compiled_segments import Backend
from placer.executor.faults import Place, failed_module, nothing_held, raise_explained
from placer.executor.latest_shapes import LatestShapes
from placer.executor.pipeline import cut, micro_batch_sizes
from placer.executor.program import Capture, shapes
from placer.executor.segments import segments, taken_in_turn
from placer.executor.state.assignment import Assignment
from placer.executor.state.statistics import refuse_uncaptured
from placer.executor.training.input_gradients import detached, hand_out
from placer.executor.training.kept import Kept
from placer.executor.training.pipeline import SCHEDULES, Order, Recipe, TrainingPipeline
from placer.executor.training.update import Update
from placer.executor.training.weighing import Weigh, Weighing
from placer.executor.training.weights import Weights
from placer.graph import arguments, autocast
from placer.graph.batch import batch_size
from placer.graph.given import refuse_no_chunks, refuse_no_loss, refuse_sum
from placer.graph.layers import LayerGraph
from placer.graph.losses import LossFunction, refuse_no_number, refuse_other_batch, refuse_untrained
from placer.graph.structure import Structure, flatten, flatten_inputs
from placer.warned import warn


class Flow(Protocol):
    """What a training step needs of a ``DataFlow``."""

    module: nn.Module
    chunks: int
    in_flight: Sequence[int]
    enable_clone: bool
    deferred_batch_norm: bool
    gradients_wait: bool
    output_device: torch.device
    lock: RLock

    @property
    def not_captured_because(self) -> str:
        """Why the model runs through hooks; empty where it does not."""

    @property
    def assignment(self) -> Assignment | None:
        """The devices of the layers; None before the first ``update_flow``."""

    def follow(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Keep what an optimizer has for parameters where these are, from now on."""

    def recomputed(self) -> frozenset[torch.device]:
        """The devices that run forwards once more in their backward passes."""

    def captured(self, tensors: list[Any], inputs: Structure, needed: bool = True) -> Capture | None:
        """The capture for inputs like these; None where the model runs through hooks."""

    def whole(self, tensors: list[Any], inputs: Structure, needed: bool = True) -> frozenset[int]:
        """The positions of those that are no part of the batch, though as long."""

    def holds(self, capture: Capture) -> bool:
        """Whether a capture is still of the model as it is."""

    def layers(self, capture: Capture) -> tuple[LayerGraph, list[torch.device]]:
        """The layers of a capture and the device of each."""

    def __call__(self, *args: Any, chunks: int | None = None, **kwargs: Any) -> Any:
        """Run the model."""


class _Batch(NamedTuple):
    """What a step takes, flattened.

    Attributes:
        tensors: the inputs.
        inputs: their structure.
        goals: the target.
        target: its structure.
        sizes: samples in each micro-batch.
    """

    tensors: list[Any]
    inputs: Structure
    goals: list[Any]
    target: Structure
    sizes: list[int]

    def without_gradients(self) -> _Batch:
        """The same, nothing of which asks for a gradient."""
        return self._replace(tensors=_without_gradients(self.tensors), goals=_without_gradients(self.goals))


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
        self._of_inputs = _steps_inputs_alone(update, flow.module)
        self.flow = flow
        self.loss_fn = Weighing(loss_fn, weigh)
        self.update = update
        self.schedule = schedule
        self.compile = compile
        self._pipelines = _no_pipelines()
        self._placed: Any = None
        self._others = _Others(update, flow.module)
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
            keep, self.flow.gradients_wait = self.flow.gradients_wait, False
            loss = self._computed(batch, keep)
            self.flow.gradients_wait = not update
            if update:
                self.update(self.flow.module)
                self._others.wait_no_longer()
            else:
                _waiting.add(self.flow)
            return loss

    def _computed(self, batch: _Batch, keep: bool) -> Tensor:
        """The loss of a batch; gradients are in place then, and gone where it fails."""
        pipeline = None
        try:
            pipeline = self._ready(batch)
            self._others.look(pipeline)
            if not keep:
                self._others.drop_gradients()
            if pipeline is None:
                return self._through_hooks(batch, keep)
            return pipeline.run(batch.tensors, batch.goals, keep, self.update.scale(pipeline.stages[-1].device))
        except BaseException as error:
            self.flow.module.zero_grad()
            self._let_go(None if isinstance(error, Exception) else pipeline)
            raise

    def _ready(self, batch: _Batch) -> TrainingPipeline | None:
        """As ``_pipeline``, its passes made; without those of other shapes, where there is no memory for both.

        A shape beside others is recorded when it comes for the second time.
        """
        pipeline = self._pipeline(batch)
        others = len(self._pipelines) - 1
        try:
            if pipeline is not None:
                with nothing_held():
                    # Recording pays where a shape comes back: the first is taken to, others when they have.
                    pipeline.prepare(batch.tensors, batch.goals, record=pipeline.is_prepared or not others)
            return pipeline
        except torch.OutOfMemoryError as error:
            if not others:
                raise
            why = str(error)
        pipeline = None
        self._pipelines.keep_only(lambda key: False)
        devices.release_cache()
        warn(
            f"there is no memory for a batch of this shape beside the passes of {others} other(s), which are let go of "
            f"and made again when such a batch comes: {why}"
        )
        return self._pipeline(batch)

    def _let_go(self, interrupted: TrainingPipeline | None) -> None:
        """Keep no passes that were half made, and none that an interrupt, which comes anywhere, may have left so."""
        for key, pipeline in list(self._pipelines.items()):
            if pipeline is interrupted or not pipeline.is_prepared:
                with suppress(RuntimeError):  # of a device that is lost the first error tells
                    self._pipelines.let_go(key)

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
        return self._pipeline(batch, needed=True), batch.tensors, batch.goals

    def _taken(self, inputs: Any, target: Any, chunks: int | None) -> _Batch:
        """Inputs and target, flattened and with their structures, and the sizes of micro-batches."""
        self._refuse()
        tensors, structure = flatten_inputs(*arguments.split(inputs))
        goals, target_structure = flatten(target)
        size = batch_size(tensors)
        _refuse_no_batch(inputs, tensors, size)
        refuse_other_batch(goals, size)
        self._refuse_nothing_stepped([*tensors, *goals])
        sizes = _sizes(self.flow.chunks if chunks is None else chunks, size)
        if len(sizes) > 1:
            goals, target_structure = self.loss_fn.with_weights(inputs, target, tensors, size)
        batch = _Batch(tensors, structure, goals, target_structure, sizes)
        return batch if torch.is_grad_enabled() else batch.without_gradients()

    def __getstate__(self) -> dict[str, Any]:
        """Without the passes, which are made again when needed."""
        return {**self.__dict__, "_pipelines": None, "_placed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pipelines = _no_pipelines()

    @property
    def pipelines(self) -> list[TrainingPipeline]:
        """What batches went through so far: one for each shape that is kept, the latest used last."""
        return list(self._pipelines.values())

    @property
    def not_recorded_because(self) -> dict[str, str]:
        """For each segment on a GPU that runs without CUDA graphs: which layer does not allow them, and why."""
        return {place: why for item in self._pipelines.values() for place, why in item.not_recorded_because.items()}

    @property
    def compiled(self) -> dict[str, str]:
        """For each segment that torch.compile made faster: by how much, as measured."""
        return {place: gain for item in self._pipelines.values() for place, gain in item.compiled.items()}

    @property
    def not_compiled_because(self) -> dict[str, str]:
        """For each segment that runs without torch.compile though it was asked for: why."""
        return {place: why for item in self._pipelines.values() for place, why in item.not_compiled_because.items()}

    def _refuse_nothing_stepped(self, given: list[Any]) -> None:
        """An optimizer of none of the model's parameters steps what the batch is made of, or nothing."""
        if self._of_inputs and not any(isinstance(one, Tensor) and one.requires_grad for one in given):
            raise InputError(
                f"the optimizer holds no parameter of this {type(self.flow.module).__name__}, and no input requires a "
                "gradient, so a step would change nothing; make it from flow.parameters(), or give an input that is, "
                "or is made of, what it holds"
            )

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
        _room(flow)

    def _pipeline(self, batch: _Batch, needed: bool = False) -> TrainingPipeline | None:
        """The stages for batches like this one; None where micro-batches run one after another through the flow.

        So they do where there is no capture; where a layer reads a number that another took from a tensor: passes are
        prepared once, and would keep the number that they were prepared with; where a segment uses what another one
        changes; and where parameters have hooks, which passes over aliases of them would not run.
        """
        flow, (tensors, inputs, goals, target, sizes) = self.flow, batch
        if flow.assignment is not self._placed:
            self._pipelines.keep_only(lambda key: False)
            self._placed = flow.assignment
        whole = self._whole(batch, needed)
        parts = cut(tensors, sizes, whole)
        capture = flow.captured(parts[0], inputs, needed)
        if capture is None:
            return None
        recompute = flow.recomputed()
        asked = tuple(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in (*tensors, *goals))
        room = _room(flow) if self.schedule == "interleaved" else ()
        ways = flow.deferred_batch_norm, recompute, room
        key = (capture, shapes(parts[0]), tuple(sizes), target.key, _kinds(goals), asked, *ways)
        known = self._pipelines.used(key)
        if known is not None and not known.is_stale():
            return None if _hooked(known.weights) else known
        self._pipelines.keep_only(lambda other: other != key and flow.holds(other[0]))
        graph, places = flow.layers(capture)
        if graph.passes_numbers_on or _hooked(Weights.of(graph)):
            return None
        if len(sizes) > 1 and _in_turn(graph, places, flow.deferred_batch_norm):
            return None
        if sizes[-1] != sizes[0] and flow.captured(parts[-1], inputs) is not capture:
            # The smaller last micro-batch has another graph, perhaps of other layers: equal ones then.
            equal = _equal_sizes(len(sizes), sum(sizes))
            _tell_of(equal, sizes)
            return self._pipeline(batch._replace(sizes=equal), needed)
        recipe = Recipe(
            self.loss_fn,
            capture.exported.outputs,
            target,
            self.schedule,
            tuple(sizes),
            flow.deferred_batch_norm,
            recompute,
            self.compile,
            capture.exported.checkpoints,
            room,
            whole,
        )
        self._pipelines.make_room()
        self._pipelines[key] = made = TrainingPipeline(graph, places, recipe)
        made.weights.leave_out(flow.module.parameters())
        return made

    def _whole(self, batch: _Batch, needed: bool = False) -> frozenset[int]:
        """The positions of the inputs that are not cut with the batch."""
        return self.flow.whole(batch.tensors, batch.inputs, needed) if len(batch.sizes) > 1 else frozenset()

    @torch.enable_grad()
    def _through_hooks(self, batch: _Batch, keep: bool) -> Tensor:
        """A model that could not be captured: micro-batches one after another."""
        module, place = self.flow.module, self.flow.output_device
        tensors, inputs, goals, target, sizes = batch
        if self.flow.deferred_batch_norm and len(sizes) > 1:
            refuse_uncaptured(module, self.flow.not_captured_because or "micro-batches run in turn")
        kept = Kept(module.buffers(), {devices.location(tensor) for tensor in module.parameters()})
        kept.save()
        if not keep:
            module.zero_grad()
        losses: list[Tensor] = []
        given = [*tensors, *goals]
        leaves = detached(given)
        of_inputs, of_target = leaves[: len(tensors)], leaves[len(tensors) :]
        parts = zip(cut(of_inputs, sizes, self._whole(batch)), cut(of_target, sizes), sizes, strict=True)
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
            kept.restore()
            raise_explained(error, self._place(error, len(losses)))
        return torch.stack(losses).sum()

    def _tell_once(self) -> None:
        """Say why the model runs through hooks, the first time that it does."""
        if self.flow.not_captured_because and not self._has_told:
            self._has_told = True
            _told(f"the model is not captured: {self.flow.not_captured_because}")

    def _place(self, error: BaseException, micro_batch: int) -> Place:
        """Where a micro-batch failed on its way through hooks."""
        layer = failed_module(error, self.flow.module)
        assignment = self.flow.assignment
        device = assignment.of_path(layer) if assignment is not None and layer else None
        return Place(micro_batch, "training", 0, 0, device or self.flow.output_device, layer)


_waiting: WeakSet[Any] = WeakSet()
"""The flows whose gradients have waited for a step."""


class _Others:
    """The parameters that an optimizer steps and the model does not have: another flow's, or an input.

    A step begins for them as ``optimizer.zero_grad()`` does, which knows of no model.

    Args:
        update: with the optimizer.
        model: the flow's.
    """

    def __init__(self, update: Update, model: nn.Module) -> None:
        self._update, self._model = update, model
        self._parameters: list[Tensor] = []
        self._seen: Any = None

    def look(self, pipeline: TrainingPipeline | None) -> None:
        """Find them, where the model or the optimizer may have others than at the last look.

        Args:
            pipeline: what a batch goes through, made anew for a model that is changed; None where it runs through
                hooks.
        """
        seen = pipeline and ref(pipeline), self._update.count
        if pipeline is None or seen != self._seen:
            own = {id(parameter) for parameter in self._model.parameters()}
            self._parameters = [one for one in self._update.parameters() if id(one) not in own]
            self._seen = seen

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": None}

    def drop_gradients(self) -> None:
        """Let the gradients of earlier steps go, but for those that wait for this one."""
        if not self._parameters:
            return
        wait = {id(one) for flow in _waiting if flow.gradients_wait for one in flow.module.parameters()}
        for parameter in self._parameters:
            if id(parameter) not in wait:
                parameter.grad = None

    def wait_no_longer(self) -> None:
        """Flows whose parameters were stepped beside the model's begin anew."""
        stepped = {id(parameter) for parameter in self._parameters}
        for flow in [*_waiting] if stepped else ():
            if any(id(parameter) in stepped for parameter in flow.module.parameters()):
                flow.gradients_wait = False


def _no_pipelines() -> LatestShapes[TrainingPipeline]:
    return LatestShapes(lambda pipeline: pipeline.lanes)


def _hooked(weights: Weights) -> bool:
    """Whether the user has hooks on a parameter; says so."""
    name = weights.hooked()
    return name is not None and _told(f"parameter {name!r} has hooks, which a pipeline would not run")


def _in_turn(graph: LayerGraph, places: list[torch.device], gathered: bool) -> bool:
    """Whether a micro-batch would find in a buffer what later ones left; says so."""
    name = taken_in_turn(segments(graph, places, lambda name, _: graph.state[name]), gathered)
    return name is not None and _told(f"buffer {name!r} is changed in one segment and used in another")


def _told(why: str) -> bool:
    warn(f"{why}: micro-batches run one after another")
    return True


def _tell_of(equal: list[int], sizes: list[int]) -> None:
    """Say that micro-batches are of other sizes than those asked for."""
    warn(
        f"forward does something else with the {sizes[-1]} samples of the last micro-batch than with {sizes[0]}: "
        f"micro-batches are {len(equal)} of {equal[0]}, not {len(sizes)}; "
        f"a batch whose size {len(sizes)} divides keeps them"
    )


def _without_gradients(tensors: list[Any]) -> list[Any]:
    return [tensor.detach() if isinstance(tensor, Tensor) else tensor for tensor in tensors]


def _room(flow: Flow) -> tuple[int, ...]:
    """For how many micro-batches each segment has room, as the flow says."""
    given = flow.in_flight
    if (
        isinstance(given, str)
        or not isinstance(given, Sequence)
        or not all(type(one) is int and one > 0 for one in given)
    ):
        raise InputError(
            f"flow.in_flight is {given!r}: give a number of micro-batches, 1 or more, for each segment, or () for as "
            "many as the order needs"
        )
    return tuple(given)


def _kinds(goals: list[Any]) -> Hashable:
    """What passes keep of a target beside its values."""
    return tuple((goal.shape, goal.dtype) if isinstance(goal, Tensor) else None for goal in goals)


def _steps_inputs_alone(update: Update, model: nn.Module) -> bool:
    """Whether an optimizer holds no parameter of a model, which is frozen: a prompt, say.

    Raises:
        InputError: it holds none of a model that is not.
    """
    stepped, own = update.parameters(), {id(parameter): parameter for parameter in model.parameters()}
    if not stepped or any(id(parameter) in own for parameter in stepped):
        return False
    if any(parameter.requires_grad for parameter in own.values()):
        raise InputError(
            f"the optimizer holds no parameter of this {type(model).__name__}, so a step would change nothing; "
            "make it from flow.parameters()"
        )
    return True


def _refuse_no_batch(inputs: Any, tensors: list[Any], size: int) -> None:
    if not any(isinstance(tensor, Tensor) for tensor in tensors):
        raise InputError(f"inputs, {kind_of(inputs)}, hold no tensor; give tensors, as torch.as_tensor(x) is")
    if not size:
        raise InputError("the batch has no samples: leave empty batches out")


def _sizes(wanted: int, size: int) -> list[int]:
    """Of the micro-batches."""
    refuse_no_chunks(wanted)
    return micro_batch_sizes(size, wanted)


def _equal_sizes(wanted: int, size: int) -> list[int]:
    """The most micro-batches, up to those wanted, of one size."""
    count = next(count for count in range(min(wanted, size), 0, -1) if size % count == 0)
    return [size // count] * count
