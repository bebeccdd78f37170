"""The stages of a training step: made, recorded, and run with the passes of a schedule.

Work is issued from one thread, in an order in which everything that a pass waits for was issued
before it. Passes of one device go into one lane; copies go in lanes of their own, from the stage
that made a value straight to each stage that reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
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
from placer.executor.state.replication import ONE_PIPELINE, Replication
from placer.executor.training.feed import Feed
from placer.executor.training.input_gradients import InputGradients, detached
from placer.executor.training.loss.loss_weights import Weighing
from placer.executor.training.stage_pieces import piece_starts, pieces_of_segments
from placer.executor.training.stage_transfers import crossings
from placer.executor.training.stages.compiled_stages import compile_stage
from placer.executor.training.stages.recomputed_stage import RecomputedStage
from placer.executor.training.stages.training_slot import Collected, Head, Key, TrainingSlot
from placer.executor.training.stages.training_stage import TrainingStage, drop_unreached
from placer.executor.training.stages.weight_aliases import Keep, Weights, keep_none
from placer.executor.training.step_rollback import Kept
from placer.executor.training.training_engine import TrainingEngine
from placer.schedule import Pass, Plan, plan
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
        sizes: samples in each micro-batch of a batch; the last may be smaller than the others. With
            several pipelines, samples in each part: one for each pipeline, then the parts of the
            next micro-batch.
        dims: of each input, the dimension that it is cut along; None where every micro-batch has
            all of it.
        goal_dims: the same of the target.
        deferred_batch_norm: whether running statistics follow whole batches.
        recompute: devices that run forwards once more in the backward pass, and keep no
            activations.
        compile: the backend of torch.compile, for segments that it makes faster; None to compile
            nothing.
        checkpoints: the modules that the model itself lets run again in the backward pass.
        replication: the pipelines that take the parts of each micro-batch.
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
    replication: Replication = ONE_PIPELINE

    def loss(self, leaves: list[Any], targets: list[Any]) -> tuple[Tensor, dict[str, Any]]:
        """Return a micro-batch's loss and its further values, from flattened result and target."""
        return self.loss_fn(self.outputs.unflatten(leaves), self.target.unflatten(targets))

    @property
    def pipelines(self) -> int:
        """The number of pipelines; a batch of few samples leaves some without any."""
        return min(self.replication.count, len(self.sizes))

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
        weights: of another pipeline over the same layers, for batches of another shape; None for
            weights of its own.

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
        weights: Weights | None = None,
    ) -> None:
        self.graph = graph
        self.recipe = recipe
        self.sizes = recipe.sizes
        self.pipelines = recipe.pipelines
        self.chunks = len(self.sizes) // self.pipelines
        self.weights = Weights.from_graph(graph) if weights is None else weights
        self.statistics = BatchStatistics(graph.state) if recipe.deferred_batch_norm else None
        # gradients are exchanged piece by piece
        starts = piece_starts(graph, places, recipe.replication) if self.pipelines > 1 else set()
        self._pieces = pieces_of_segments(places, starts)
        self._segment_of = [number for number, row in enumerate(self._pieces) for _ in row]
        parts = [self._segments(pipeline, places, starts) for pipeline in range(self.pipelines)]
        every = [part for row in parts for part in row]
        self.weights.bind(every, self._length)
        self.collected: list[Collected] = []
        self.lanes = {place: Lane(place) for place in dict.fromkeys(part.device for part in every)}
        first = [parts[0][pieces[0]].device for pieces in self._pieces]
        self._device_of = [list(self.lanes).index(place) for place in first]
        room = recipe.in_flight if len(recipe.in_flight) == len(self._pieces) else None
        self.plan = plan(recipe.schedule, self._device_of, self.chunks, room=room)
        self.stages: list[TrainingStage] = []
        for pipeline, row in enumerate(parts):
            self._add_pipeline(pipeline, row, places)
        self.courier = Courier()
        self.engine = TrainingEngine(self.stages, self.lanes, self.courier)
        self._kept = Kept(_mutated(graph), self.lanes)
        self._buffers = _buffers(graph)
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
        heads = self._heads
        if outputs and self.is_prepared:
            return heads[0].collects
        if not self.is_recorded:
            for head in heads:
                head.collects = outputs
            for slot in self._last_slots():
                if slot.collected is not None:
                    slot.collected.outputs = slot.collected.outputs if outputs else None
        return True

    def _last_slots(self) -> list[TrainingSlot]:
        return [slot for stage in self._last_stages for slot in stage.all_slots()]

    @property
    def _length(self) -> int:
        """The stages of one pipeline."""
        return len(self._segment_of)

    @property
    def _last_stages(self) -> list[TrainingStage]:
        """The last stage of every pipeline, which computes the loss."""
        return [stage for stage in self.stages if stage.head is not None]

    @property
    def loss_device(self) -> torch.device:
        """The device of the loss."""
        return self._last_stages[0].device

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
            The mean loss, a number on ``loss_device``, without the scale.
        """
        if not self.is_prepared:
            self.prepare(batch, targets)
        self._set_apart()
        self._kept.save()
        try:
            self._run(batch, targets, keep, scale)
        except BaseException:
            self.recover()
            raise
        totals = [devices.move(head.total, self.loss_device) for head in self._heads]
        total = totals[0] if len(totals) == 1 else torch.stack(totals).sum()
        return total.to(self._heads[0].dtype, copy=True)

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
        feed = Feed(given, self.sizes, self.courier, begun, dims, self._parts_on)
        last = self._last_stages
        self.collected = []
        for number in range(len(self.sizes)):
            stage = last[number % self.pipelines]
            # on the caller's stream, whose memory it is
            with devices.current(stage.device):
                self.collected.append(Collected.like(stage.slot(number).collected))
        self._issue(feed, gradients, begun, keep, scale)
        for place, lane in self.lanes.items():
            callers[place].wait(lane.mark())
        for (place, _), mark in feed.read.items():
            callers[place].wait(mark)
        self.weights.finish(callers)
        if self.statistics is not None:
            self.statistics.commit()
        gradients.hand_out()

    @cached_property
    def _rounds(self) -> list[list[list[int]]]:
        """By segment, the pipelines that run at one time; see ``Replication.rounds``."""
        places, rounds = list(self.lanes), self.recipe.replication.rounds
        return [rounds(places[index], self.pipelines) for index in self._device_of]

    @cached_property
    def _parts_on(self) -> dict[torch.device, list[int]]:
        """The parts of a batch that the stages of each device compute."""
        pipelines: dict[torch.device, set[int]] = {}
        for number, stage in enumerate(self.stages):
            pipelines.setdefault(stage.device, set()).add(number // self._length)
        return {
            place: [part for part in range(len(self.sizes)) if part % self.pipelines in own]
            for place, own in pipelines.items()
        }

    @property
    def penalised(self) -> list[nn.Parameter]:
        """The parameters that the loss reads by itself.

        They are known once the passes were made.
        """
        return [parameter for head in self._heads for parameter in head.parameters]

    @property
    def _heads(self) -> list[Head]:
        return [stage.head for stage in self.stages if stage.head is not None]

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
        self.weights.begin(self.lanes, begun, keep, self.courier)
        for stage in self._last_stages:
            assert stage.head is not None
            with self.lanes[stage.device], torch.no_grad():
                stage.head.total.zero_()
                self._set_scale(stage.head, scale)
        self._scaled = scale is not None
        for stage in self.stages:
            stage.begin()
        order = self.passes()
        self.engine.run_batch(order, feed, gradients, self.collected, self.weights.exchange)

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

    def _segments(
        self, pipeline: int, places: Sequence[torch.device], starts: Collection[int]
    ) -> list[Segment]:
        """Return the segments of a pipeline.

        Args:
            pipeline: its number.
            places: the device of every layer in pipeline 0.
            starts: numbers of layers with which a piece of a segment begins.
        """
        replication = self.recipe.replication
        parts = segments(
            self.graph,
            replication.places(pipeline, places),
            self.weights.lookup(self.graph, replication, pipeline),
            starts=starts,
        )
        return with_checkpoints(parts, self.recipe.checkpoints)

    def _add_pipeline(
        self, pipeline: int, parts: Sequence[Segment], places: Sequence[torch.device]
    ) -> None:
        """Add stages with the values that cross their borders; the last has the loss."""
        replication, offset = self.recipe.replication, len(self.stages)
        last = parts[-1].device
        head = Head(
            self.graph.outputs,
            self.recipe.loss,
            torch.zeros((), device=last, dtype=torch.float64),
            torch.ones((), device=last),
        )
        recompute = {own for place in self.recipe.recompute for own in replication.of(place)}
        spread = set(spread_state(self.graph, replication.places(pipeline, places)))
        reads, writes = borders(parts, self.graph.outputs)
        for index, part in enumerate(parts):
            gather = (
                nullcontext if self.statistics is None else partial(self.statistics.gather, index)
            )
            again = part.device in recompute
            kind, split = (RecomputedStage, False) if again else (TrainingStage, self.plan.split)
            mine = head if index == len(parts) - 1 else None
            sent = {
                name: [offset + reader for reader in readers]
                for name, readers in writes[index].items()
            }
            stage = kind(part, reads[index], sent, mine, split, gather, self.weights.reach)
            stage.position, stage.pipelines = index, self.pipelines
            if self.recipe.compile is None:
                stage.is_shared = len(self._rounds[self._segment_of[index]]) > 1
                alike = self.stages[index :: self._length]
                near = (one for one in alike if one.device == stage.device)
                stage.twin = next(near, alike[0] if alike else None)
            used = {name for step in part.steps for name in step.layer.state}
            stage.spread = {(pipeline, name) for name in spread & used}
            self.stages.append(stage)
            stage.joined = self._joined(stage, self.stages[offset : offset + index])

    def _joined(
        self, stage: TrainingStage, before: Sequence[TrainingStage]
    ) -> dict[str, TrainingStage]:
        """Return by value that a stage reads the stage of the same segment that makes it.

        Args:
            stage: the reader.
            before: the earlier stages of its pipeline.
        """
        segment = self._segment_of[len(before)]
        return {
            name: maker
            for maker, its in zip(before, self._segment_of, strict=False)
            if its == segment
            for name in maker.writes
            if name in stage.reads
        }

    def passes(self) -> list[Pass]:
        """Return the passes of all pipelines, which take turns so that all devices are at work.

        Where a segment is in pieces, a pass of it is one pass of each piece. Where pipelines share
        a device, a pass of it is one pass of each of them.
        """
        return [
            Pass(pipeline * self._length + piece, phase, micro_batch * self.pipelines + pipeline)
            for segment, phase, micro_batch in self.plan.issue
            for pipelines in self._rounds[segment]
            for piece in self._pieces[segment][:: 1 if phase == "forward" else -1]
            for pipeline in pipelines
        ]

    def _set_apart(self) -> None:
        """Let replicas draw random numbers of their own."""
        if self.pipelines > 1 and any(layer.random for layer in self.graph.layers):
            for first in {pieces[0] for pieces in self._pieces}:
                alike = dict.fromkeys(stage.device for stage in self.stages[first :: self._length])
                devices.set_apart(list(alike))

    def _set_scale(self, head: Head, scale: Tensor | None) -> None:
        if scale is not None:
            devices.fill(head.scale, scale)
        elif self._scaled:
            head.scale.fill_(1.0)

    def _balanced(self) -> Plan:
        """Return the schedule for the measured times of passes and transfers.

        It keeps the room that there is.
        """
        times = [stage.pass_ms() for stage in self.stages]
        # the slowest pipeline counts; a segment takes as long as its pieces, in all pipelines that
        # share its device
        slowest = [
            [max(some) for some in zip(*times[piece :: self._length], strict=True)]
            for piece in range(self._length)
        ]
        forward, backward, weights = (
            [
                len(rounds) * sum(slowest[piece][phase] for piece in pieces)
                for rounds, pieces in zip(self._rounds, self._pieces, strict=True)
            ]
            for phase in range(3)
        )
        whole = [one + other for one, other in zip(backward, weights, strict=True)]
        return plan(
            self.recipe.schedule,
            self._device_of,
            self.chunks,
            forward_ms=forward,
            backward_ms=whole,
            weight_grad_ms=weights,
            transfers=[
                one.repeated(max(len(self._rounds[one.source]), len(self._rounds[one.target])))
                for one in crossings(self.stages[: self._length], self._segment_of)
            ],
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
        self._set_apart()
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
        return [detached([column[part] for column in columns]) for part in range(len(self.sizes))]

    def _open(self, parts: Sequence[Sequence[Any]], goals: Sequence[Sequence[Any]]) -> None:
        """Give every stage its slots, and one stage's results to the next."""
        shares = self.recipe.shares
        room_of = [
            (self.plan.in_flight[segment], self.plan.backward_memory(segment))
            for segment, pieces in enumerate(self._pieces)
            for _ in pieces
        ]
        for pipeline in range(self.pipelines):
            first, last = pipeline, (self.chunks - 1) * self.pipelines + pipeline
            # Recorded passes have one shape: a smaller last micro-batch needs a slot of its own.
            uneven = self.sizes[last] != self.sizes[first]
            begin = pipeline * self._length
            stages = list(enumerate(self.stages))[begin : begin + self._length]
            known: dict[str, Any] = dict(zip(self.graph.inputs, parts[first], strict=True))
            for (index, stage), (in_flight, memories) in zip(stages, room_of, strict=True):
                with self._naming(index, "first", first):
                    room = min(self.chunks - uneven, in_flight)
                    stage.memories = memories[:room]
                    known |= stage.open_slots(room, known, goals[first], shares[first])
            known = dict(zip(self.graph.inputs, parts[last], strict=True))
            for index, stage in stages if uneven else ():
                with self._naming(index, "first", last):
                    known |= stage.open_tail(last, known, goals[last], shares[last])
        drop_unreached(self.stages)
        for stage in self.stages:
            stage.join()

    def _record(self) -> None:
        """Compile, if that was asked for, and record the passes; then order them by their times."""
        for index, stage in enumerate(self.stages):
            with self._naming(index, "recorded", 0):
                devices.synchronise(stage.device)
                stage.release()
                stage.fix_inputs()
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


def _mutated(graph: LayerGraph) -> list[Tensor]:
    """Return the state that forward passes change."""
    names = dict.fromkeys(name for layer in graph.layers for name in layer.mutated)
    return [graph.state[name] for name in names]


def _buffers(graph: LayerGraph) -> list[Tensor]:
    """Return the state that is no parameter."""
    state = {name: graph.state[name] for layer in graph.layers for name in layer.state}
    return [item for item in state.values() if not isinstance(item, nn.Parameter)]
