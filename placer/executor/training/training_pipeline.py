"""The stages of a training step: made, recorded, and run with the passes of a schedule.

Work is issued from one thread, in an order in which everything that a pass waits for was issued
before it. Passes of one device go into one lane; copies go in lanes of their own, from the stage
that made a value straight to each stage that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.batch_dims.batch_layout import cut_tensor
from placer.capture.layers import LayerGraph
from placer.capture.pytrees import Structure
from placer.devices import Courier, Lane, Mark
from placer.errors import InputError
from placer.executor.engine.checkpointed_segments import with_checkpoints
from placer.executor.engine.compiled_segments import Backend
from placer.executor.segments import Segment, borders, segments, spread_state
from placer.executor.stage_errors import explain
from placer.executor.state.batch_statistics import BatchStatistics
from placer.executor.training.feed import Feed
from placer.executor.training.input_gradients import InputGradients, detached
from placer.executor.training.loss.loss_weights import Weighing
from placer.executor.training.stage_transfers import crossings
from placer.executor.training.stages.compiled_stages import compile_stage
from placer.executor.training.stages.recomputed_stage import RecomputedStage
from placer.executor.training.stages.training_slot import Collected, Head, Key, TrainingSlot
from placer.executor.training.stages.training_stage import TrainingStage, drop_unreached
from placer.executor.training.stages.weight_aliases import Keep, Weights, keep_none
from placer.executor.training.step_rollback import Kept
from placer.executor.training.training_engine import TrainingEngine
from placer.schedule import Plan, plan
from placer.schema import Schedule
from placer.utils.error_translation import ErrorTranslation

PENALTY = (
    "loss_fn reads parameters in addition to its arguments, and no pass over layers would bring "
    "them their gradients"
)
"""Why a batch has no pipeline if its loss reads parameters by itself."""

Order = Schedule
SCHEDULES: tuple[str, ...] = get_args(Schedule)


@dataclass(frozen=True)
class Recipe:
    """What a pipeline does with batches of one shape.

    Attributes:
        loss_fn: the loss of a micro-batch, and its further values.
        outputs: structure of the model's result.
        target: structure of the target.
        schedule: the order of micro-batches.
        sizes: samples in each micro-batch of a batch; the last may be smaller than the others.
        dims: of each input, the dimension that it is cut along; None where every micro-batch has
            all of it.
        goal_dims: the same of the target.
        deferred_batch_norm: whether running statistics follow whole batches.
        recompute: devices that run forwards once more in the backward pass, and keep no
            activations.
        compile: the backend of torch.compile, for segments that it makes faster; None to compile
            nothing.
        checkpoints: the modules that the model itself lets run again in the backward pass.
        in_flight: for how many micro-batches each segment has room under ``zero-bubble`` and
            ``interleaved``. If it is of another length than the segments, there is as much room as
            the order has a use for.
    """

    loss_fn: Weighing
    outputs: Structure
    target: Structure
    schedule: Order
    sizes: tuple[int, ...]
    dims: tuple[int | None, ...]
    goal_dims: tuple[int | None, ...]
    deferred_batch_norm: bool = False
    recompute: frozenset[torch.device] = frozenset()
    compile: Backend | None = None
    checkpoints: tuple[str, ...] = ()
    in_flight: tuple[int, ...] = ()

    def loss(self, leaves: list[Any], targets: list[Any]) -> tuple[Tensor, dict[str, Any]]:
        """Return a micro-batch's loss and its further values, from flattened result and target."""
        return self.loss_fn(self.outputs.unflatten(leaves), self.target.unflatten(targets))

    @property
    def shares(self) -> list[float]:
        """The weight of each micro-batch's loss in the batch's."""
        return self.loss_fn.shares(self.sizes)


class PenaltyError(InputError):
    """The loss reads parameters that are not in the model's result.

    A penalty of their size does so.
    """


class TrainingPipeline:
    """The stages of one capture, ready for batches of one shape.

    Args:
        graph: of the model at the micro-batch's shape.
        places: the device of every layer.
        recipe: what to do with them.

    Attributes:
        stages: in order.
        plan: the order of passes.
        engine: what issues them.
        is_prepared: whether its passes are ready; a batch has gone through then.
        is_recorded: whether they were recorded, too, where they can be.
        collected: by micro-batch of the latest batch, the model's results and the loss's further
            values, flattened, as far as ``collect`` asks for them.
    """

    def __init__(
        self,
        graph: LayerGraph,
        places: Sequence[torch.device],
        recipe: Recipe,
    ) -> None:
        self.graph = graph
        self.recipe = recipe
        self.sizes = recipe.sizes
        self.chunks = len(self.sizes)
        self.weights = Weights.from_graph(graph)
        self.statistics = BatchStatistics(graph.state) if recipe.deferred_batch_norm else None
        parts = with_checkpoints(
            segments(graph, places, self.weights.lookup(graph)), recipe.checkpoints
        )
        last = parts[-1].device
        head = Head(
            graph.outputs,
            recipe.loss,
            torch.zeros((), device=last, dtype=torch.float64),
            torch.ones((), device=last),
        )
        self.collected: list[Collected] = []
        self.lanes = {part.device: Lane(part.device) for part in parts}
        self._device_of = [list(self.lanes).index(part.device) for part in parts]
        room = recipe.in_flight if len(recipe.in_flight) == len(parts) else None
        self.plan = plan(recipe.schedule, self._device_of, self.chunks, room=room)
        self.stages = self._stages(parts, head)
        spread = set(spread_state(graph, places))
        for stage in self.stages:
            used = {name for step in stage.segment.steps for name in step.layer.state}
            stage.spread = spread & used
        self.courier = Courier()
        self.engine = TrainingEngine(self.stages, self.lanes, self.courier)
        mutated = dict.fromkeys(name for layer in graph.layers for name in layer.mutated)
        self._kept = Kept((graph.state[name] for name in mutated), self.lanes)
        state = {name: graph.state[name] for layer in graph.layers for name in layer.state}
        self._buffers = [item for item in state.values() if not isinstance(item, nn.Parameter)]
        # A recording reads fixed addresses. A tensor that moves makes it stale.
        self._pointers = devices.addresses(self._buffers)
        self.is_prepared = False
        self.is_recorded = False
        self._scaled = False

    def is_stale(self) -> bool:
        """Return whether a parameter or a buffer has moved since the passes were made for it."""
        return self.weights.stale() or devices.addresses(self._buffers) != self._pointers

    def collect(self, outputs: bool) -> bool:
        """Ask for the model's results of each micro-batch, or no longer.

        Recorded passes go on collecting them.

        Returns:
            False if the passes were made without results, so that another pipeline is needed.
        """
        head = self._head
        if outputs and self.is_prepared:
            return head.collects
        if not self.is_recorded:
            head.collects = outputs
            for slot in self._last_slots():
                if slot.collected is not None:
                    slot.collected.outputs = slot.collected.outputs if outputs else None
        return True

    def _last_slots(self) -> list[TrainingSlot]:
        return self.stages[-1].all_slots()

    def run(
        self,
        batch: Sequence[Any],
        targets: Sequence[Any],
        keep: Keep = keep_none,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Run one batch forwards and backwards; then the parameters have its gradients.

        Args:
            batch: the flattened inputs; those that require a gradient are given theirs.
            targets: the flattened target, likewise.
            keep: whether a parameter's gradient is added to the one that is there.
            scale: a number that every gradient is multiplied by; 1 if None.

        Returns:
            The mean loss, a number on the last stage's device, without the scale.
        """
        if not self.is_prepared:
            self.prepare(batch, targets)
        self._kept.save()
        try:
            self._run(batch, targets, keep, scale)
        except BaseException:
            self.recover()
            raise
        head = self._head
        return head.total.to(head.dtype, copy=True)

    def _run(
        self, batch: Sequence[Any], targets: Sequence[Any], keep: Keep, scale: Tensor | None
    ) -> None:
        if self.statistics is not None:
            self.statistics.begin()
        given: dict[Key, Any] = {
            **dict(zip(self.graph.inputs, batch, strict=True)),
            **dict(enumerate(targets)),
        }
        owners = {devices.location(item) for item in given.values() if isinstance(item, Tensor)}
        callers = {
            place: Lane(place, caller=True) for place in (*self.lanes, *owners, *self.weights.homes)
        }
        self.weights.refresh()  # in the caller's order: the lanes begin after it
        begun = {place: caller.mark() for place, caller in callers.items()}
        dims: dict[Key, int | None] = dict(zip(self.graph.inputs, self.recipe.dims, strict=True))
        dims |= enumerate(self.recipe.goal_dims)
        gradients = InputGradients(given, self.sizes, self.courier, dims)
        given = dict(zip(given, detached(list(given.values())), strict=True))
        feed = Feed(given, self.sizes, self.courier, begun, dims)
        last = self.stages[-1]
        # on the caller's stream, whose memory it is
        with devices.current(last.device):
            self.collected = [
                Collected.like(last.slot(chunk).collected) for chunk in range(self.chunks)
            ]
        self._issue(feed, gradients, begun, keep, scale)
        for place, lane in self.lanes.items():
            callers[place].wait(lane.mark())
        for (place, _), mark in feed.read.items():
            callers[place].wait(mark)
        self.weights.finish()
        if self.statistics is not None:
            self.statistics.commit()
        gradients.hand_out()

    @property
    def penalised(self) -> list[nn.Parameter]:
        """The parameters that the loss reads by itself.

        They are known once the passes were made.
        """
        return self._head.parameters

    @property
    def _head(self) -> Head:
        head = self.stages[-1].head
        assert head is not None
        return head

    def _issue(
        self,
        feed: Feed,
        gradients: InputGradients,
        begun: Mapping[torch.device, Mark],
        keep: Keep,
        scale: Tensor | None,
    ) -> None:
        """Issue a batch to the lanes.

        Each lane begins when its own device has done what the caller issued there.
        """
        shared = any(stage.spread for stage in self.stages)  # then they work on each other's state
        for place, lane in self.lanes.items():
            lane.wait(*(begun.values() if shared else [begun[place]]))
        self.weights.begin(self.lanes, begun, keep)
        with self.lanes[self.stages[-1].device], torch.no_grad():
            self._head.total.zero_()
            self._set_scale(self._head, scale)
        for stage in self.stages:
            stage.begin()
        self.engine.run_batch(self.plan.issue, feed, gradients, self.collected)

    def recover(self) -> None:
        """Wait for the devices, restore buffers and drop gradients, after a batch that failed."""
        # a lost device raises here too; the first error has already reported it
        with suppress(RuntimeError):
            for place in self.lanes:
                devices.synchronise(place)
        for stage in self.stages:
            stage.release()
        self._kept.restore()
        self.weights.drop()

    def _stages(self, parts: Sequence[Segment], head: Head) -> list[TrainingStage]:
        """Return segments with the values that cross their borders; the last has the loss."""
        reads, writes = borders(parts, self.graph.outputs)
        stages = []
        for index, part in enumerate(parts):
            gather = (
                nullcontext if self.statistics is None else partial(self.statistics.gather, index)
            )
            again = part.device in self.recipe.recompute
            kind, split = (RecomputedStage, False) if again else (TrainingStage, self.plan.split)
            mine = head if index == len(parts) - 1 else None
            stages.append(
                kind(part, reads[index], writes[index], mine, split, gather, self.weights.reach)
            )
        return stages

    def _set_scale(self, head: Head, scale: Tensor | None) -> None:
        if scale is not None:
            devices.fill(head.scale, scale)
        elif self._scaled:
            head.scale.fill_(1.0)
        self._scaled = scale is not None

    def _balanced(self) -> Plan:
        """Return the schedule for the measured times of passes and transfers.

        It keeps the room that there is.
        """
        forward, backward, weights = zip(*(stage.pass_ms() for stage in self.stages), strict=True)
        whole = [one + other for one, other in zip(backward, weights, strict=True)]
        return plan(
            self.recipe.schedule,
            self._device_of,
            self.chunks,
            forward_ms=forward,
            backward_ms=whole,
            weight_grad_ms=weights,
            transfers=crossings(self.stages),
            room=self.plan.in_flight,
        )

    def prepare(self, batch: Sequence[Any], targets: Sequence[Any], record: bool = True) -> None:
        """Make every stage's slots from a batch, once, and record their passes.

        Buffers and random numbers are restored.

        Args:
            batch: the flattened inputs.
            targets: the flattened target.
            record: False leaves passes that are not recorded yet to be issued operation by
                operation.

        Raises:
            PenaltyError: the loss reads parameters by itself.
        """
        if self.is_prepared and (self.is_recorded or not record):
            return
        parts, goals = self._cut(batch, self.recipe.dims), self._cut(targets, self.recipe.goal_dims)
        self._kept.save()
        try:
            if not self.is_prepared:
                self._open(parts, goals)
            if self.penalised:
                raise PenaltyError(PENALTY)
            if record:
                self.weights.leave_to_holders()
                self._record()
        except BaseException:
            # the next batch makes new slots
            for stage in self.stages:
                stage.close_slots()
            self.is_prepared = False
            raise
        finally:
            self._kept.restore()
        self.is_prepared, self.is_recorded = True, record

    def _cut(self, given: Sequence[Any], dims: Sequence[int | None]) -> list[list[Any]]:
        """Return what each micro-batch has of these tensors, as leaves of their own."""
        columns = [
            cut_tensor(tensor, dim, "", self.sizes) for tensor, dim in zip(given, dims, strict=True)
        ]
        return [detached([column[chunk] for column in columns]) for chunk in range(self.chunks)]

    def _open(self, parts: Sequence[Sequence[Any]], goals: Sequence[Sequence[Any]]) -> None:
        """Give every stage its slots, and one stage's results to the next."""
        shares = self.recipe.shares
        last = self.chunks - 1
        # Recorded passes have one shape: a smaller last micro-batch needs a slot of its own.
        uneven = self.sizes[last] != self.sizes[0]
        known: dict[str, Any] = dict(zip(self.graph.inputs, parts[0], strict=True))
        for index, stage in enumerate(self.stages):
            with self._naming(index, "first", 0):
                room = min(self.chunks - uneven, self.plan.in_flight[index])
                stage.memories = self.plan.backward_memory(index)[:room]
                known |= stage.open_slots(room, known, goals[0], shares[0])
        known = dict(zip(self.graph.inputs, parts[last], strict=True))
        for index, stage in enumerate(self.stages if uneven else ()):
            with self._naming(index, "first", last):
                known |= stage.open_tail(last, known, goals[last], shares[last])
        drop_unreached(self.stages)

    def _record(self) -> None:
        """Compile, if that was asked for, and record the passes; then order them by their times."""
        for index, stage in enumerate(self.stages):
            with self._naming(index, "recorded", 0):
                devices.synchronise(stage.device)
                stage.release()
                if self.recipe.compile is not None:
                    compile_stage(stage, self.recipe.compile)
                stage.record()
        # An optimizer's state, allocated next, would leave gaps in cached pieces of memory.
        devices.release_cache()
        self.engine.warn_of_eager_stages()
        # 1F1B and fill-drain do not depend on times. The other orders fit the measured ones.
        alone = len(set(self._device_of)) == len(self._device_of)
        if self.plan.split or (self.recipe.schedule == "interleaved" and not alone):
            self.plan = self._balanced()

    def _naming(self, index: int, phase: str, micro_batch: int) -> ErrorTranslation:
        """Let an error inside say in which pass it happened."""
        return ErrorTranslation(
            lambda error: explain(error, self.engine.place(index, phase, micro_batch))
        )
