"""A training step through the pipeline: forward and backward passes in the order of a schedule, then the optimizer.

Work is issued from one thread, in an order in which everything that a pass waits for was issued before it. Passes of
one device go into one lane; copies go beside them, from the stage that made a value straight to each stage that reads
it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor

from placer import devices
from placer.devices import Courier, Lane, Mark
from placer.executor.checkpointed import with_checkpoints
from placer.executor.compiled import Backend, compile_stage
from placer.executor.faults import Place, explain
from placer.executor.issued import Issued
from placer.executor.kept import Kept
from placer.executor.ordering import stage_by_stage
from placer.executor.pipeline import cut
from placer.executor.recomputed import RecomputedStage
from placer.executor.segments import Segment, borders, segments, spread_state
from placer.executor.stage import Head, Stage, drop_unreached
from placer.executor.statistics import BatchStatistics
from placer.executor.weights import Weights
from placer.graph.layers import LayerGraph
from placer.graph.structure import Structure
from placer.schedule import Phase as Half
from placer.schedule import Plan, plan
from placer.schema import Schedule

Loss = Callable[[Any, Any], Tensor]
Order = Schedule
SCHEDULES: tuple[str, ...] = get_args(Schedule)


@dataclass(frozen=True)
class Recipe:
    """What a pipeline is to do with batches of one shape.

    Attributes:
        loss_fn: ``loss_fn(output, target)``, a mean over samples.
        outputs: structure of the model's result.
        target: structure of the target.
        schedule: the order of micro-batches.
        sizes: samples in each micro-batch of a batch; the last may be smaller than the others.
        deferred_batch_norm: whether running statistics follow whole batches.
        recompute: devices that run forwards once more in the backward pass, and so keep no activations.
        compile: the backend of torch.compile, for segments that it makes faster; None to leave them as they are.
        checkpoints: the modules that the model itself lets run again in the backward pass.
    """

    loss_fn: Loss
    outputs: Structure
    target: Structure
    schedule: Order
    sizes: tuple[int, ...]
    deferred_batch_norm: bool = False
    recompute: frozenset[torch.device] = frozenset()
    compile: Backend | None = None
    checkpoints: tuple[str, ...] = ()

    def loss(self, leaves: list[Any], targets: list[Any]) -> Tensor:
        """The loss from the flattened result and target of a micro-batch."""
        return self.loss_fn(self.outputs.unflatten(leaves), self.target.unflatten(targets))


class TrainingPipeline:
    """The stages of one capture, ready for batches of one shape.

    Args:
        graph: of the model at the micro-batch's shape.
        places: the device of every layer.
        recipe: what is done with them.

    Attributes:
        trace: a list that collects every pass of the next batches; None, as it is at first, to collect none.
    """

    def __init__(
        self,
        graph: LayerGraph,
        places: Sequence[torch.device],
        recipe: Recipe,
    ) -> None:
        graph, places = stage_by_stage(graph, places)
        self.graph = graph
        self.recipe = recipe
        self.sizes = recipe.sizes
        self.chunks = len(self.sizes)
        self.weights = Weights.of(graph)
        self.statistics = BatchStatistics(graph.state) if recipe.deferred_batch_norm else None
        parts = with_checkpoints(segments(graph, places, self.weights.lookup(graph)), recipe.checkpoints)
        last = parts[-1].device
        head = Head(
            graph.outputs,
            recipe.loss,
            torch.zeros((), device=last, dtype=torch.float64),
            torch.ones((), device=last),
        )
        self.lanes = {part.device: Lane(part.device) for part in parts}
        self._device_of = [list(self.lanes).index(part.device) for part in parts]
        self.plan = plan(recipe.schedule, self._device_of, self.chunks)
        self.stages = self._stages(parts, head)
        self.courier = Courier()
        mutated = dict.fromkeys(name for layer in graph.layers for name in layer.mutated)
        self._kept = Kept(graph.state[name] for name in mutated)
        spread = set(spread_state(graph, places))
        self.spread = [spread.intersection(name for step in part.steps for name in step.layer.state) for part in parts]
        self.trace: list[Issued] | None = None
        self._prepared = False
        self._scaled = False

    def run(
        self, batch: Sequence[Any], targets: Sequence[Any], keep: bool = False, scale: Tensor | None = None
    ) -> Tensor:
        """One batch, forwards and backwards; gradients are the parameters' afterwards.

        Args:
            batch: the flattened inputs.
            targets: the flattened target.
            keep: whether the gradients are added to those that are there.
            scale: a number that every gradient is multiplied by; 1 if None.

        Returns:
            The mean loss, a number on the last stage's device, without the scale.
        """
        parts, goals = cut(batch, self.sizes), cut(targets, self.sizes)
        if not self._prepared:
            self._prepare(parts, goals)
        self._kept.save()
        callers = {place: Lane(place, caller=True) for place in self.lanes}
        begun = [caller.mark() for caller in callers.values()]
        for lane in self.lanes.values():
            lane.wait(*begun)
        try:
            self._issue(parts, goals, keep, scale)
        except BaseException:
            self._recover()
            raise
        for place, caller in callers.items():
            caller.wait(self.lanes[place].mark())
        self.weights.finish()
        if self.statistics is not None:
            self.statistics.commit()
        head = self._head
        return head.total.to(head.dtype, copy=True)

    @property
    def not_recorded_because(self) -> dict[str, str]:
        """For each segment on a GPU that runs without CUDA graphs: which layer does not allow them, and why."""
        return self._by_segment("not_recorded_because")

    @property
    def compiled(self) -> dict[str, str]:
        """For each segment that torch.compile made faster: by how much."""
        return self._by_segment("compiled")

    @property
    def not_compiled_because(self) -> dict[str, str]:
        """For each segment that runs without torch.compile though it was asked for: why."""
        return self._by_segment("not_compiled_because")

    def _by_segment(self, attribute: str) -> dict[str, str]:
        return {
            f"segment {index} of {len(self.stages)} on {stage.device}": getattr(stage, attribute)
            for index, stage in enumerate(self.stages)
            if getattr(stage, attribute)
        }

    @property
    def _head(self) -> Head:
        head = self.stages[-1].head
        assert head is not None
        return head

    def _issue(
        self, parts: Sequence[Sequence[Any]], goals: Sequence[Sequence[Any]], keep: bool, scale: Tensor | None
    ) -> None:
        """Issue a batch to the lanes."""
        self.weights.begin(self.lanes, keep)
        if self.statistics is not None:
            self.statistics.begin()
        with self.lanes[self.stages[-1].device], torch.no_grad():
            self._head.total.zero_()
            self._set_scale(self._head, scale)
        for stage in self.stages:
            stage.begin()
        start = {place: lane.mark() for place, lane in self.lanes.items()}
        _Step(self, parts, goals, start).issue()

    def _recover(self) -> None:
        """After a batch that failed: nothing runs any more, buffers are as they were, and there are no gradients."""
        with suppress(RuntimeError):  # of a device that is lost the first error tells
            for place in self.lanes:
                devices.synchronise(place)
        for stage in self.stages:
            stage.release()
        self._kept.restore()
        self.weights.drop()

    def _stages(self, parts: Sequence[Segment], head: Head) -> list[Stage]:
        """Segments with what passes between them; the last one has the loss."""
        reads, writes = borders(parts, self.graph.outputs)
        stages = []
        for index, part in enumerate(parts):
            gather = nullcontext if self.statistics is None else partial(self.statistics.gather, index)
            again = part.device in self.recipe.recompute
            kind, split = (RecomputedStage, False) if again else (Stage, self.plan.split)
            mine = head if index == len(parts) - 1 else None
            values, reach = self.graph.values, self.weights.reach
            stages.append(kind(part, values, reads[index], writes[index], mine, split, gather, reach))
        return stages

    def _set_scale(self, head: Head, scale: Tensor | None) -> None:
        if scale is not None:
            devices.fill(head.scale, scale)
        elif self._scaled:
            head.scale.fill_(1.0)
        self._scaled = scale is not None

    def _balanced(self) -> Plan:
        """The schedule by the stages' own times, where there is room for it."""
        forward, backward, weights = zip(*(stage.pass_ms() for stage in self.stages), strict=True)
        whole = [one + other for one, other in zip(backward, weights, strict=True)]
        found = plan(
            self.recipe.schedule,
            self._device_of,
            self.chunks,
            forward_ms=forward,
            backward_ms=whole,
            weights_ms=weights,
        )
        fits = all(new <= old for new, old in zip(found.in_flight, self.plan.in_flight, strict=True))
        return found if fits else self.plan

    def _prepare(self, parts: Sequence[Sequence[Any]], goals: Sequence[Sequence[Any]]) -> None:
        """Make every stage's slots from these micro-batches, and record them; buffers and random numbers stay."""
        self._kept.save()
        try:
            with devices.keep_random_state(list(self.lanes)):
                self._open(parts, goals)
        except BaseException:
            for stage in self.stages:  # the next batch begins anew
                stage.close_slots()
            raise
        finally:
            self._kept.restore()
        self._prepared = True

    def _open(self, parts: Sequence[Sequence[Any]], goals: Sequence[Sequence[Any]]) -> None:
        """Give every stage its slots, one stage's results to the next, and record their passes."""
        shares = [size / sum(self.sizes) for size in self.sizes]
        last = self.chunks - 1
        uneven = self.sizes[last] != self.sizes[0]
        known: dict[str, Any] = dict(zip(self.graph.inputs, parts[0], strict=True))
        for index, stage in enumerate(self.stages):
            with self._naming(index, "first", 0):
                room = min(self.chunks - uneven, self.plan.in_flight[index])
                known |= stage.open_slots(room, known, goals[0], shares[0])
        known = dict(zip(self.graph.inputs, parts[last], strict=True))
        for index, stage in enumerate(self.stages if uneven else ()):
            with self._naming(index, "first", last):
                known |= stage.open_tail(last, known, goals[last], shares[last])
        drop_unreached(self.stages)
        for index, stage in enumerate(self.stages):
            with self._naming(index, "recorded", 0):
                devices.synchronise(stage.device)
                if self.recipe.compile is not None:
                    compile_stage(stage, self.recipe.compile)
                stage.record()
        for place, why in self.not_recorded_because.items():
            warnings.warn(f"{place} runs without CUDA graphs, which takes the host more time: {why}", stacklevel=2)
        if self.recipe.schedule in ("zero-bubble", "interleaved"):
            self.plan = self._balanced()

    @contextmanager
    def _naming(self, index: int, phase: str, micro_batch: int) -> Iterator[None]:
        """Let an error inside say in which pass it happened."""
        try:
            yield
        except BaseException as error:
            self.fail(error, index, phase, micro_batch)

    def fail(self, error: BaseException, index: int, phase: str, micro_batch: int) -> NoReturn:
        """Raise for an error what says in which pass it happened."""
        stage = self.stages[index]
        found = explain(error, Place(micro_batch, phase, index, len(self.stages), stage.device, stage.trail.layer))
        if found is error:
            raise error
        raise found from error


class _Step:
    """One batch on its way through the stages: what was issued, and when it will be there."""

    def __init__(
        self,
        pipeline: TrainingPipeline,
        parts: Sequence[Sequence[Any]],
        goals: Sequence[Sequence[Any]],
        start: Mapping[torch.device, Mark],
    ) -> None:
        self._stages = pipeline.stages
        self._lanes = pipeline.lanes
        self._courier = pipeline.courier
        self._pipeline = pipeline
        self._batch = [dict(zip(pipeline.graph.inputs, part, strict=True)) for part in parts]
        self._goals = goals
        self._start = start
        self._last: Half = "weights" if pipeline.plan.split else "backward"
        self._trace = pipeline.trace
        self._maker = {name: index for index, stage in enumerate(self._stages) for name in stage.writes}
        self._done: dict[tuple[int, Half, int], Mark] = {}
        self._fetched: dict[tuple[int, Half, int], list[Mark]] = {}
        self._landed: dict[tuple[int, int], list[Mark]] = {}
        self._turns: dict[str, Mark] = {}

    def issue(self) -> None:
        """Issue every pass."""
        for stage, phase, micro_batch in self._pipeline.plan.issue:
            if phase == "forward":
                self._forward(stage, micro_batch)
            elif phase == "backward":
                self._backward(stage, micro_batch)
            else:
                self._run(stage, "weights", micro_batch, self._stages[stage].slot(micro_batch).weights, [])

    def _forward(self, index: int, chunk: int) -> None:
        stage = self._stages[index]
        slot = stage.slot(chunk)
        free = self._done.get((index, self._last, chunk - len(stage.slots)), self._start[stage.device])
        outside = (None, index, "forward", chunk)
        arrived = []
        for name in stage.reads:
            static = slot.inputs[name]
            if not isinstance(static, Tensor):
                continue
            maker = self._maker.get(name)
            if maker is None:
                given = self._batch[chunk][name]
                arrived.append(self._courier.send(given, self._start[stage.device], static, free, "batch", outside))
                continue
            source = self._stages[maker]
            made = source.slot(chunk).outputs[name].detach()
            label = (maker, index, "forward", chunk)
            mark = self._courier.send(made, self._done[maker, "forward", chunk], static, free, "forward", label)
            self._fetched.setdefault((maker, "forward", chunk), []).append(mark)
            arrived.append(mark)
        for given, static in zip(self._goals[chunk], slot.targets, strict=False):
            if isinstance(static, Tensor):
                arrived.append(self._courier.send(given, self._start[stage.device], static, free, "batch", outside))
        overwritten = self._fetched.get((index, "forward", chunk - len(stage.slots)), [])
        if not stage.keeps_graph:
            overwritten = [*overwritten, *self._fetched.get((index, "backward", chunk - len(stage.slots)), [])]
        # A buffer that layers of several devices change has one at a time.
        spread = self._pipeline.spread[index]
        turns = [self._turns[name] for name in spread if name in self._turns]
        self._run(index, "forward", chunk, slot.forward, [*arrived, *overwritten, *turns])
        self._turns.update(dict.fromkeys(spread, self._done[index, "forward", chunk]))

    def _backward(self, index: int, chunk: int) -> None:
        stage = self._stages[index]
        slot = stage.slot(chunk)
        sent_before = self._fetched.get((index, "backward", chunk - len(stage.slots)), [])
        self._run(index, "backward", chunk, slot.backward, [*self._landed.pop((index, chunk), []), *sent_before])
        # Gradients leave at once: the slot that waits for them is theirs until its backward pass, this one is not.
        for name, gradient in slot.input_gradients.items():
            maker = self._maker.get(name)
            if maker is None:
                continue
            source = self._stages[maker]
            target = source.slot(chunk).gradients.get((name, index))
            if target is None:
                continue
            free = self._done.get((maker, "backward", chunk - len(source.slots)), self._start[source.device])
            label = (index, maker, "backward", chunk)
            mark = self._courier.send(gradient, self._done[index, "backward", chunk], target, free, "backward", label)
            self._landed.setdefault((maker, chunk), []).append(mark)
            self._fetched.setdefault((index, "backward", chunk), []).append(mark)

    def _run(self, index: int, phase: Half, chunk: int, work: Callable[[], None], after: Sequence[Mark]) -> None:
        lane = self._lanes[self._stages[index].device]
        lane.wait(*after)
        began = lane.mark(timed=True) if self._trace is not None else None
        try:
            with lane:
                work()
        except BaseException as error:
            self._pipeline.fail(error, index, phase, chunk)
        ended = self._done[index, phase, chunk] = lane.mark(timed=self._trace is not None)
        if self._trace is not None:
            self._trace.append(Issued(lane.device, index, phase, chunk, began, ended))
