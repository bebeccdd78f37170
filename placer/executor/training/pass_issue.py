"""The passes of one batch in training, and the copies between them, issued in the order of the
schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from placer.devices import Mark
from placer.executor.engine.pass_trace import Issued
from placer.executor.stage_errors import raise_explained
from placer.executor.training.feed import Feed
from placer.executor.training.input_gradients import InputGradients
from placer.executor.training.stages.training_slot import Key, Slot
from placer.schedule import Phase as Half

if TYPE_CHECKING:
    from placer.executor.training.training_pipeline import TrainingPipeline


class Passes:
    """One batch on its way through the stages: what was issued, and when it will be there.

    Each device begins as soon as its own part of the step before is over, whatever others still do
    of that.

    Args:
        pipeline: the stages, their lanes and their plan.
        feed: the batch and the target.
        gradients: of those that require one.
        start: by device, when its gradients and copies of parameters are ready for the batch.
    """

    def __init__(
        self,
        pipeline: TrainingPipeline,
        feed: Feed,
        gradients: InputGradients,
        start: Mapping[torch.device, Mark],
    ) -> None:
        self._stages = pipeline.stages
        self._lanes = pipeline.lanes
        self._courier = pipeline.courier
        self._pipeline = pipeline
        self._feed = feed
        self._gradients = gradients
        self._start = start
        self._last: Half = "weights" if pipeline.plan.split else "backward"
        self._trace = pipeline.trace
        self._maker = {
            name: index for index, stage in enumerate(self._stages) for name in stage.writes
        }
        self._done: dict[tuple[int, Half, int], Mark] = {}
        self._landed: dict[tuple[int, int], list[Mark]] = {}
        # values a gradient of which has come, and micro-batches
        self._summed: set[tuple[str, int]] = set()
        self._turns: dict[str, Mark] = {}

    def issue(self) -> None:
        """Issue every pass."""
        for stage, phase, micro_batch in self._pipeline.plan.issue:
            if phase == "forward":
                self._forward(stage, micro_batch)
            elif phase == "backward":
                self._backward(stage, micro_batch)
            else:
                self._run(
                    stage, "weights", micro_batch, self._stages[stage].slot(micro_batch).weights, []
                )

    def _forward(self, index: int, chunk: int) -> None:
        stage = self._stages[index]
        slot = stage.slot(chunk)
        free = self._free(slot, stage.device)
        arrived = []
        coming: defaultdict[int, list[str]] = defaultdict(list)
        for name in stage.reads:
            static = slot.inputs[name]
            if not isinstance(static, Tensor):
                continue
            maker = self._maker.get(name)
            if maker is None:
                given = (None, index, "forward", chunk)
                arrived.append(self._feed.send(name, chunk, stage.device, static, free, given))
            else:
                coming[maker].append(name)
        for maker, names in coming.items():
            source = self._stages[maker].slot(chunk)
            made, statics = (
                [source.outputs[name].detach() for name in names],
                [slot.inputs[name] for name in names],
            )
            ready, label = self._done[maker, "forward", chunk], (maker, index, "forward", chunk)
            mark = self._courier.send_all(made, ready, statics, free, "forward", label)
            source.fetched.append(mark)
            arrived.append(mark)
        for position, static in enumerate(slot.targets):
            if isinstance(static, Tensor):
                given = (None, index, "forward", chunk)
                arrived.append(self._feed.send(position, chunk, stage.device, static, free, given))
        overwritten, slot.fetched = slot.fetched, []
        if stage.reuses:
            overwritten = [*overwritten, *slot.sent]
        # A buffer that layers of several devices change has one at a time.
        spread = self._pipeline.spread[index]
        turns = [self._turns[name] for name in spread if name in self._turns]
        self._run(index, "forward", chunk, slot.forward, [*arrived, *overwritten, *turns])
        self._turns.update(dict.fromkeys(spread, self._done[index, "forward", chunk]))
        if slot.collected is not None and index == len(self._stages) - 1:
            with self._lanes[stage.device]:
                self._pipeline.collected[chunk].take(slot.collected)

    def _free(self, slot: Slot, place: torch.device) -> Mark:
        """When a slot may be written to: the micro-batch that it had, perhaps of the batch before,
        is through.
        """
        return self._start[place] if slot.over is None else slot.over

    def _backward(self, index: int, chunk: int) -> None:
        stage = self._stages[index]
        slot = stage.slot(chunk)
        sent_before, slot.sent = slot.sent, []
        self._run(
            index,
            "backward",
            chunk,
            slot.backward,
            [*self._landed.pop((index, chunk), []), *sent_before],
        )
        # Gradients leave at once: the slot that waits for them is theirs until its backward pass,
        # this one is not.
        going: defaultdict[int, list[tuple[Tensor, Tensor, bool]]] = defaultdict(list)
        for name, gradient in slot.input_gradients.items():
            if isinstance(name, int) or name not in self._maker:
                self._leave(index, chunk, name, gradient)
                continue
            maker = self._maker[name]
            if index in self._stages[maker].awaited.get(name, ()):
                target = self._stages[maker].slot(chunk).gradients[name]
                going[maker].append((gradient, target, (name, chunk) in self._summed))
                self._summed.add((name, chunk))
        for maker, sums in going.items():
            gradients, targets, adds = zip(*sums, strict=True)
            landed = self._landed.setdefault((maker, chunk), [])
            free = [self._free(self._stages[maker].slot(chunk), self._stages[maker].device)]
            if any(adds):
                free += landed
            ready, label = self._done[index, "backward", chunk], (index, maker, "backward", chunk)
            mark = self._courier.send_all(gradients, ready, targets, free, "backward", label, adds)
            landed.append(mark)
            slot.sent.append(mark)

    def _leave(self, index: int, chunk: int, key: Key, gradient: Tensor) -> None:
        """Let the gradient of what the caller gave leave the pipeline."""
        slot = self._stages[index].slot(chunk)
        if key in self._gradients and key not in slot.unreached:
            label = (index, None, "backward", chunk)
            done = self._done[index, "backward", chunk]
            slot.sent.append(self._gradients.take(key, index, chunk, gradient, done, label))

    def _run(
        self, index: int, phase: Half, chunk: int, work: Callable[[], None], after: Sequence[Mark]
    ) -> None:
        lane = self._lanes[self._stages[index].device]
        lane.wait(*after)
        began = lane.mark(timed=True) if self._trace is not None else None
        try:
            with lane:
                work()
        except BaseException as error:
            raise_explained(error, self._pipeline.place(index, phase, chunk))
        ended = self._done[index, phase, chunk] = lane.mark(timed=self._trace is not None)
        if phase == self._last:
            self._stages[index].slot(chunk).over = ended
        if self._trace is not None:
            self._trace.append(Issued(lane.device, index, phase, chunk, began, ended))
