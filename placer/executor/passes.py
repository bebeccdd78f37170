"""The passes of one batch in training, and the copies between them, issued in the order of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from placer import devices
from placer.devices import Mark
from placer.executor.issued import Issued
from placer.schedule import Phase as Half

if TYPE_CHECKING:
    from placer.executor.train import TrainingPipeline


class Passes:
    """One batch on its way through the stages: what was issued, and when it will be there.

    Attributes:
        read: when a stage has read the last of what a device has of the batch and the target.
    """

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
        self.read: dict[tuple[torch.device, int], Mark] = {}

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
        arrived = []
        for name in stage.reads:
            static = slot.inputs[name]
            if not isinstance(static, Tensor):
                continue
            maker = self._maker.get(name)
            if maker is None:
                arrived.append(self._take(self._batch[chunk][name], static, free, index, chunk))
                continue
            source = self._stages[maker]
            made = source.slot(chunk).outputs[name].detach()
            label = (maker, index, "forward", chunk)
            mark = self._courier.send(made, self._done[maker, "forward", chunk], static, free, "forward", label)
            self._fetched.setdefault((maker, "forward", chunk), []).append(mark)
            arrived.append(mark)
        for given, static in zip(self._goals[chunk], slot.targets, strict=False):
            if isinstance(static, Tensor):
                arrived.append(self._take(given, static, free, index, chunk))
        overwritten = self._fetched.get((index, "forward", chunk - len(stage.slots)), [])
        if stage.reuses:
            overwritten = [*overwritten, *self._fetched.get((index, "backward", chunk - len(stage.slots)), [])]
        # A buffer that layers of several devices change has one at a time.
        spread = self._pipeline.spread[index]
        turns = [self._turns[name] for name in spread if name in self._turns]
        self._run(index, "forward", chunk, slot.forward, [*arrived, *overwritten, *turns])
        self._turns.update(dict.fromkeys(spread, self._done[index, "forward", chunk]))

    def _take(self, given: Tensor, static: Tensor, free: Mark, index: int, chunk: int) -> Mark:
        """Copy what the caller gave into a slot."""
        place, label = self._stages[index].device, (None, index, "forward", chunk)
        source = devices.staged(given, place)
        mark = self._courier.send(source, self._start[place], static, free, "batch", label)
        if source is given:
            self.read[devices.location(given), index] = mark
        return mark

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
