"""A training step through the pipeline: forward and backward passes in the order of a schedule, then the optimizer.

Work is issued from one thread, in an order in which everything that a pass waits for was issued before it. Passes of
one device go into one lane; copies go beside them, from the stage that made a value straight to each stage that reads
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from placer import devices
from placer.devices import Courier, Lane, Mark
from placer.executor.pipeline import clock, cut
from placer.executor.segments import Segment, segments
from placer.executor.stage import Head, Stage
from placer.executor.weights import Weights
from placer.graph.layers import LayerGraph
from placer.graph.structure import Structure
from placer.schedule import Phase as Half
from placer.schedule import plan
from placer.schema import Schedule

Loss = Callable[[Any, Any], Tensor]
Order = Schedule
SCHEDULES: tuple[str, ...] = get_args(Schedule)


class Pass(NamedTuple):
    """One pass as it was issued, between two marks in the lane of its stage's device."""

    stage: int
    phase: Half
    micro_batch: int
    began: Mark
    ended: Mark


class TrainingPipeline:
    """The stages of one capture, ready for batches of one shape.

    Args:
        graph: of the model at the micro-batch's shape.
        places: the device of every layer.
        outputs: structure of the model's result.
        loss_fn: ``loss_fn(output, target)``, a mean over samples.
        target: structure of the target.
        schedule: the order of micro-batches; used where every device holds one segment, else fill-drain is.
        sizes: samples in each micro-batch of a batch; the last may be smaller than the others.

    Attributes:
        trace: a list that collects every pass of the next batches; None, as it is at first, to collect none.
    """

    def __init__(
        self,
        graph: LayerGraph,
        places: Sequence[torch.device],
        outputs: Structure,
        loss_fn: Loss,
        target: Structure,
        schedule: Order,
        sizes: Sequence[int],
    ) -> None:
        self.graph = graph
        self.sizes = tuple(sizes)
        self.chunks = chunks = len(sizes)
        self.weights = Weights.of(graph)
        parts = segments(graph, places, self.weights.lookup(graph))
        last = parts[-1].device
        head = Head(
            graph.outputs,
            lambda leaves, targets: loss_fn(outputs.unflatten(leaves), target.unflatten(targets)),
            torch.zeros((), device=last, dtype=torch.float64),
            torch.ones((), device=last),
        )
        chain = len({part.device for part in parts}) == len(parts)
        self.split = schedule == "zero-bubble" and chain
        self.stages = _stages(graph, parts, head, self.split)
        self.lanes = {stage.device: Lane(stage.device) for stage in self.stages}
        self.courier = Courier()
        held = min(chunks, 2 * len(parts) - 1)
        self.in_flight = [held] * len(parts)
        self.order: list[tuple[int, Half, int]] = []
        if not self.split:
            self.order = _issue_order(len(parts), schedule if chain and schedule != "zero-bubble" else None, chunks)
            self.in_flight = _in_flight(self.order, len(parts))
        self.trace: list[Pass] | None = None
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
        callers = {place: Lane(place, caller=True) for place in self.lanes}
        for lane in self.lanes.values():
            for caller in callers.values():
                lane.wait(caller.mark())
        self.weights.begin(self.lanes, keep)
        head = self.stages[-1].head
        assert head is not None
        with self.lanes[self.stages[-1].device], torch.no_grad():
            head.total.zero_()
            self._set_scale(head, scale)
        start = {place: lane.mark() for place, lane in self.lanes.items()}
        _Step(self, parts, goals, start).issue()
        for place, caller in callers.items():
            caller.wait(self.lanes[place].mark())
        self.weights.finish()
        return head.total.to(head.dtype, copy=True)

    def _set_scale(self, head: Head, scale: Tensor | None) -> None:
        if scale is not None:
            head.scale.copy_(scale)
        elif self._scaled:
            head.scale.fill_(1.0)
        self._scaled = scale is not None

    def _balanced_order(self) -> list[tuple[int, Half, int]]:
        """Zero-bubble by the stages' own times."""
        forward, backward, weights = zip(*(stage.pass_ms() for stage in self.stages), strict=True)
        whole = [one + other for one, other in zip(backward, weights, strict=True)]
        places = range(len(self.stages))
        found = plan("zero-bubble", places, self.chunks, forward_ms=forward, backward_ms=whole, weights_ms=weights)
        return list(found.issue)

    def _prepare(self, parts: Sequence[Sequence[Any]], goals: Sequence[Sequence[Any]]) -> None:
        """Make every stage's slots from these micro-batches, and record them; buffers and random numbers stay."""
        mutated = {name for layer in self.graph.layers for name in layer.mutated}
        kept = {name: self.graph.state[name].clone() for name in mutated}
        try:
            with devices.keep_random_state(list(self.lanes)):
                self._open(parts, goals)
        except BaseException:
            for stage in self.stages:  # the next batch begins anew
                stage.close_slots()
            raise
        finally:
            with torch.no_grad():
                for name, value in kept.items():
                    self.graph.state[name].copy_(value)
        self._prepared = True

    def _open(self, parts: Sequence[Sequence[Any]], goals: Sequence[Sequence[Any]]) -> None:
        """Give every stage its slots, one stage's results to the next, and record their passes."""
        shares = [size / sum(self.sizes) for size in self.sizes]
        last = self.chunks - 1 if self.sizes[-1] != self.sizes[0] else None
        whole = self.chunks if last is None else last
        known: dict[str, Any] = dict(zip(self.graph.inputs, parts[0], strict=True))
        for index, stage in enumerate(self.stages):
            known |= stage.open_slots(min(whole, self.in_flight[index]), known, goals[0], shares[0])
        if last is not None:
            known = dict(zip(self.graph.inputs, parts[last], strict=True))
            for stage in self.stages:
                known |= stage.open_tail(last, known, goals[last], shares[last])
        for stage in self.stages:
            devices.synchronise(stage.device)
            stage.record()
        if self.split:
            self.order = self._balanced_order()


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
        self._order = pipeline.order
        self._batch = [dict(zip(pipeline.graph.inputs, part, strict=True)) for part in parts]
        self._goals = goals
        self._start = start
        self._last: Half = "weights" if pipeline.split else "backward"
        self._trace = pipeline.trace
        self._maker = {name: index for index, stage in enumerate(self._stages) for name in stage.writes}
        self._done: dict[tuple[int, Half, int], Mark] = {}
        self._fetched: dict[tuple[int, Half, int], list[Mark]] = {}
        self._landed: dict[tuple[int, int], list[Mark]] = {}

    def issue(self) -> None:
        """Issue every pass."""
        for stage, phase, micro_batch in self._order:
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
        self._run(index, "forward", chunk, slot.forward, [*arrived, *overwritten])

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
        with lane:
            work()
        ended = self._done[index, phase, chunk] = lane.mark(timed=self._trace is not None)
        if self._trace is not None:
            self._trace.append(Pass(index, phase, chunk, began, ended))


def _stages(graph: LayerGraph, parts: Sequence[Segment], head: Head, split: bool) -> list[Stage]:
    """Segments with what passes between them; the last one has the loss."""
    made_by = {name: index for index, part in enumerate(parts) for step in part.steps for name in step.layer.writes}
    reads: list[dict[str, None]] = []
    for index, part in enumerate(parts):
        names = [name for step in part.steps for name in step.layer.reads]
        if index == len(parts) - 1:
            names += graph.outputs
        reads.append({name: None for name in names if made_by.get(name) != index})
    stages = []
    for index, part in enumerate(parts):
        writes: dict[str, list[int]] = {}
        for reader, names_read in enumerate(reads):
            for name in names_read:
                if made_by.get(name) == index:
                    writes.setdefault(name, []).append(reader)
        last = index == len(parts) - 1
        stages.append(Stage(part, graph.values, tuple(reads[index]), writes, head if last else None, split))
    return stages


def _issue_order(count: int, schedule: Schedule | None, chunks: int) -> list[tuple[int, Half, int]]:
    """Every pass of a step, after all that it waits for."""
    if schedule is not None:
        return list(plan(schedule, range(count), chunks).issue)
    return list(_fill_drain(count, chunks))


def _fill_drain(count: int, chunks: int) -> Iterator[tuple[int, Half, int]]:
    for stage, chunk in clock(count, chunks):
        yield stage, "forward", chunk
    for stage, chunk in clock(count, chunks):
        yield count - 1 - stage, "backward", chunk


def _in_flight(order: Sequence[tuple[int, Half, int]], stages: int) -> list[int]:
    """The most micro-batches that each stage holds at once."""
    held, most = [0] * stages, [0] * stages
    for stage, phase, _ in order:
        held[stage] += 1 if phase == "forward" else -1
        most[stage] = max(most[stage], held[stage])
    return most
