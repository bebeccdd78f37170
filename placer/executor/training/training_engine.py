"""The passes of one batch in training, and the copies between them.

    forward    a stage fetches what it reads right before its pass; by then its slot is free
    backward   gradients leave right behind the pass; the slot that waits for them is reserved

A schedule may run a stage far ahead of the next one, whose slots are full then. So values cannot be
sent right behind their pass, as in inference: they stay where they were made until they are read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from placer.devices import Courier, Lane, Mark
from placer.executor.engine.engine import Engine
from placer.executor.stage_errors import Place
from placer.executor.training.feed import Feed
from placer.executor.training.input_gradients import InputGradients
from placer.executor.training.stages.replica_exchange import Exchange
from placer.executor.training.stages.training_slot import Collected, Key, TrainingSlot
from placer.executor.training.stages.training_stage import TrainingStage
from placer.schedule import Pass


@dataclass
class _Batch:
    """A batch on its way through the stages.

    Attributes:
        feed: the batch and the target.
        gradients: of those that require one.
        collected: by micro-batch, room for what the caller is given in addition to the loss.
        start: by device, when its gradients and copies of parameters are ready for the batch. Each
            device begins then, whatever others still do of the step before.
        summed: names of values that a gradient has come for, with their micro-batch.
        exchange: between the devices of a parameter.
        turns: for state that several devices change, a mark behind the latest pass that did.
        left: by stage, how many passes that make gradients are still to be issued.
    """

    feed: Feed
    gradients: InputGradients
    collected: Sequence[Collected]
    start: Mapping[torch.device, Mark]
    exchange: Exchange
    left: Counter[int]
    summed: set[tuple[str, int]] = field(default_factory=set)
    turns: dict[Hashable, Mark] = field(default_factory=dict)


class TrainingEngine(Engine[TrainingStage]):
    """An engine for forward, backward and weight-gradient passes.

    Args:
        stages: in pipeline order, with slots.
        lanes: of each device.
        courier: for the copies.
    """

    def __init__(
        self,
        stages: Sequence[TrainingStage],
        lanes: Mapping[torch.device, Lane],
        courier: Courier,
    ) -> None:
        super().__init__(stages, lanes, courier)
        # by stage, where the values come from that other stages send it
        self._makers: list[dict[str, int]] = [{} for _ in stages]
        for index, stage in enumerate(stages):
            for name, readers in stage.writes.items():
                for reader in readers:
                    self._makers[reader][name] = index
        self._batch: _Batch | None = None

    def run_batch(
        self,
        order: Iterable[Pass],
        feed: Feed,
        gradients: InputGradients,
        collected: Sequence[Collected] = (),
        exchange: Exchange | None = None,
    ) -> None:
        """Issue all passes of a batch.

        Args:
            order: every pass, after all that it needs.
            feed: the batch and the target.
            gradients: of those that require one.
            collected: by micro-batch, room for what stages with a loss collect.
            exchange: between the devices of a parameter; None if each is used on one.

        Raises:
            StageError: a layer failed.
        """
        # By device, and not one mark for all: a device may begin the step while others still work
        # on the one before.
        start = {place: lane.mark() for place, lane in self.lanes.items()}
        order = list(order)
        left = Counter(item.stage for item in order if item.phase != "forward")
        exchange = Exchange() if exchange is None else exchange
        self._batch = _Batch(feed, gradients, collected, start, exchange, left)
        try:
            self.run(order)
        finally:
            self._batch = None

    def issue(self, item: Pass, turn: int | None = None) -> None:
        """Issue a pass of the batch, and the copies that it needs or makes.

        Args:
            item: the pass.
            turn: decides the slots; the number of the micro-batch if None.
        """
        assert self._batch is not None
        stage = self.stages[item.stage]
        slot = stage.slot(item.micro_batch if turn is None else turn)
        if item.phase == "forward":
            self._forward(item, stage, slot, self._batch)
            return
        if item.phase == "backward":
            self._backward(item, slot, self._batch)
        else:
            self.compute(item, slot)
        # until the weight-gradient pass, where there is one
        slot.free = [slot.made]
        self._batch.left[item.stage] -= 1
        if not self._batch.left[item.stage]:
            self._batch.exchange.finished(item.stage, slot.made)

    def place(self, index: int, phase: str, micro_batch: int) -> Place:
        """Return where a pass is; a part of a micro-batch has the number of the micro-batch."""
        return super().place(index, phase, micro_batch // self.stages[index].pipelines)

    def _forward(self, item: Pass, stage: TrainingStage, slot: TrainingSlot, batch: _Batch) -> None:
        self._fetch(item, stage, slot, batch)
        overwritten, slot.fetched = slot.fetched, []
        if stage.reuses:
            overwritten = [*overwritten, *slot.sent]
        # A buffer that layers of several devices change has one at a time.
        turns = [batch.turns[name] for name in stage.spread if name in batch.turns]
        values = batch.exchange.values_for(item.stage)
        done = self.compute(item, slot, [*overwritten, *turns, *values])
        batch.turns.update(dict.fromkeys(stage.spread, done))
        if slot.collected is not None and stage.head is not None:
            with self.lanes[stage.device]:
                batch.collected[item.micro_batch].take(slot.collected)

    def _fetch(self, item: Pass, stage: TrainingStage, slot: TrainingSlot, batch: _Batch) -> None:
        """Copy what a forward pass reads into its slot; what comes from one stage, at one time."""
        # The batch before may still be in this slot.
        free = self._free(stage, slot, batch)
        coming: defaultdict[int, list[str]] = defaultdict(list)
        for name in stage.reads:
            static = slot.inputs[name]
            if not isinstance(static, Tensor):
                continue
            maker = self._makers[item.stage].get(name)
            if name in stage.joined:
                made = stage.joined[name].slot(item.micro_batch).outputs[name].detach()
                with self.lanes[stage.device]:
                    stage.take(name, slot, made)
            elif maker is None:
                self._feed(name, item, static, free, slot, batch)
            else:
                coming[maker].append(name)
        # One wait and one mark for all values of a stage, which saves the host time.
        for maker, names in coming.items():
            source = self.stages[maker].slot(item.micro_batch)
            # A copy is no operation of autograd: gradients go back by copies, too.
            made = [source.outputs[name].detach() for name in names]
            statics = [slot.inputs[name] for name in names]
            source.fetched.append(self.send(made, source.made, statics, free, maker, item, slot))
        for position, static in enumerate(slot.targets):
            if isinstance(static, Tensor):
                self._feed(position, item, static, free, slot, batch)

    def _feed(
        self,
        key: Key,
        item: Pass,
        static: Tensor,
        free: Sequence[Mark],
        slot: TrainingSlot,
        batch: _Batch,
    ) -> None:
        """Copy a micro-batch's part of an input or a target into a slot."""
        place, label = self.stages[item.stage].device, (None, *item)
        slot.arrived.append(batch.feed.send(key, item.micro_batch, place, static, free, label))

    @staticmethod
    def _free(stage: TrainingStage, slot: TrainingSlot, batch: _Batch) -> list[Mark]:
        """Return when a slot may be written to: its micro-batch before, if any, has left it."""
        return slot.free or [batch.start[stage.device]]

    def _backward(self, item: Pass, slot: TrainingSlot, batch: _Batch) -> None:
        sent_before, slot.sent = slot.sent, []
        # the first backward pass of a device adds to gradients that were cleared during the passes
        cleared = batch.exchange.cleared.pop(self.stages[item.stage].device, None)
        done = self.compute(item, slot, [*sent_before, cleared])
        # Gradients leave at once: the slot that waits for them is theirs until its backward pass,
        # this one is not.
        going: defaultdict[int, list[tuple[Tensor, Tensor, bool]]] = defaultdict(list)
        for name, gradient in slot.input_gradients.items():
            if isinstance(name, int) or name not in self._makers[item.stage]:
                if name in batch.gradients and name not in slot.unreached:
                    self._leave(name, item, self.stages[item.stage], gradient, slot, batch)
                continue
            if name in slot.handed:
                continue
            maker = self._makers[item.stage][name]
            if item.stage in self.stages[maker].awaited.get(name, ()):
                target = self.stages[maker].slot(item.micro_batch).gradients[name]
                key = (name, item.micro_batch)
                going[maker].append((gradient, target, key in batch.summed))
                batch.summed.add(key)
        for maker, sums in going.items():
            gradients, targets, adds = zip(*sums, strict=True)
            stage = self.stages[maker]
            waiting = stage.slot(item.micro_batch)
            free = self._free(stage, waiting, batch)
            # what is added to must have come
            if any(adds):
                free = [*free, *waiting.arrived]
            reading = Pass(maker, "backward", item.micro_batch)
            slot.sent.append(
                self.send(gradients, done, targets, free, item.stage, reading, waiting, adds)
            )

    @staticmethod
    def _leave(
        key: Key,
        item: Pass,
        stage: TrainingStage,
        gradient: Tensor,
        slot: TrainingSlot,
        batch: _Batch,
    ) -> None:
        """Let the gradient of what the caller gave leave the stages."""
        label = (item.stage, None, "backward", item.micro_batch)
        slot.sent.append(
            batch.gradients.take(key, stage.position, item.micro_batch, gradient, slot.made, label)
        )
