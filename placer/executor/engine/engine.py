"""Passes issued to the devices one by one, with the copies between them.

    lane of cuda:0     ── F0 ──┬── F1 ──┬─────
                               │ copy   │ copy        copies run in lanes of their own (``Courier``)
    lane of cuda:1     ────────▼── F0 ──▼── F1 ──

The host waits for none of this. A mark stands for a point in a lane; whatever may begin only after
that point waits for the mark. Three rules keep every access in order:

1. A pass waits for the copies into its slot (``Slot.arrived``).
2. A copy out of a slot waits for the pass that made the value (``Slot.made``).
3. A copy into a slot waits until the micro-batch before has left it (``Slot.free``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from placer.devices import Courier, Lane, Mark
from placer.executor.engine.pass_trace import Issued
from placer.executor.engine.slot import Slot
from placer.executor.engine.stage import Stage
from placer.executor.stage_errors import Place, raise_explained
from placer.schedule import Pass
from placer.utils.user_warnings import warn

AnyStage = TypeVar("AnyStage", bound=Stage[Any])


class Engine(Generic[AnyStage]):
    """Stages, and the lanes of their devices, to which passes are issued in the order of a plan.

    Args:
        stages: in pipeline order.
        lanes: of each device. Without a lane, passes run in the caller's own order, like eager
            calls.
        courier: for the copies.
        unit: what a pass computes for, in error messages: a micro-batch, or in a stream a batch.

    Attributes:
        trace: a list that collects every pass; None, the initial value, to collect none.
    """

    def __init__(
        self,
        stages: Sequence[AnyStage],
        lanes: Mapping[torch.device, Lane],
        courier: Courier,
        unit: str = "micro-batch",
    ) -> None:
        self.stages = stages
        self.lanes = lanes
        self.courier = courier
        self.trace: list[Issued] | None = None
        self._unit = unit

    def run(self, order: Iterable[Pass]) -> None:
        """Issue passes, each after all that it needs.

        Raises:
            StageError: a layer failed.
        """
        for item in order:
            self.issue(item)

    def issue(self, item: Pass, turn: int | None = None) -> None:
        """Issue a forward pass, and behind it the copies of what it made to its readers.

        Args:
            item: the pass.
            turn: decides the slots; the number of the micro-batch if None. Streams that share the
                stages each number their batches from 0, and take the slots in turn.

        Raises:
            StageError: a layer failed.
        """
        turn = item.micro_batch if turn is None else turn
        stage = self.stages[item.stage]
        slot = stage.slot(turn)
        ended = self.compute(item, slot, slot.free)
        # outputs may be views of inputs: these are free when the outputs have left, too
        slot.free = [ended]
        for reader, names in stage.sent.items():
            values = {name: slot.outputs[name] for name in names}
            target = self.stages[reader].slot(turn)
            reading = Pass(reader, "forward", item.micro_batch)
            slot.free.append(self.deliver(values, ended, item.stage, reading, target))

    def compute(self, item: Pass, slot: Slot, after: Sequence[Mark] = ()) -> Mark:
        """Run a pass of a slot in the lane of its device, behind the copies that it needs.

        Args:
            item: the pass.
            slot: where it works.
            after: what else it waits for.

        Returns:
            A mark behind it; None without a lane.

        Raises:
            StageError: a layer failed.
        """
        # An eager call records no marks: they would cost the host time in every pass.
        lane = self.lanes.get(self.stages[item.stage].device)
        if lane is None:
            self._work(item, slot)
            return None
        # Taken out before anything can fail: the next micro-batch in this slot has copies of its
        # own.
        arrived, slot.arrived = slot.arrived, []
        lane.wait(*arrived, *after)
        # Events without timing are cheaper, so only traced passes have it.
        timed = self.trace is not None
        began = lane.mark(timed=True) if timed else None
        with lane:
            self._work(item, slot)
        slot.made = lane.mark(timed=timed)
        if self.trace is not None:
            self.trace.append(Issued(lane.device, *item, began, slot.made))
        return slot.made

    def _work(self, item: Pass, slot: Slot) -> None:
        try:
            slot.passes[item.phase]()
        except BaseException as error:
            raise_explained(error, self.place(*item))

    def deliver(
        self, values: Mapping[str, Any], ready: Mark, source: int | None, reading: Pass, slot: Slot
    ) -> Mark:
        """Copy values into a slot; memory for those that come for the first time is made.

        Args:
            values: by name, on one device.
            ready: when they are there.
            source: the stage that made them; None for the caller.
            reading: the pass that reads them.
            slot: where it works.

        Returns:
            A mark behind the copies; None if no value is a tensor.
        """
        place = self.stages[reading.stage].device
        tensors = {}
        for name, value in values.items():
            if not isinstance(value, Tensor):
                slot.inputs[name] = value
                continue
            tensors[name] = value
            if name not in slot.inputs:
                slot.inputs[name] = torch.empty_like(value, device=place, requires_grad=False)
                # the caller's earlier work may still use this memory
                slot.free = [*slot.free, Lane(place, caller=True).mark()]
        if not tensors:
            return None
        targets = [slot.inputs[name] for name in tensors]
        sources = list(tensors.values())
        return self.send(sources, ready, targets, slot.free, source, reading, slot)

    def send(
        self,
        sources: Sequence[Tensor],
        ready: Mark,
        targets: Sequence[Tensor],
        free: Sequence[Mark],
        source: int | None,
        reading: Pass,
        slot: Slot,
        adds: Sequence[bool] = (),
    ) -> Mark:
        """Copy tensors into a slot, whose next pass waits for them.

        Args:
            sources: on one device.
            ready: when all of them are there.
            targets: the slot's static tensors, one for each source.
            free: when these may be overwritten.
            source: the stage that made the tensors; None for the caller.
            reading: the pass that reads them.
            slot: where it works.
            adds: for each target, whether to add to it; empty to write over all of them.

        Returns:
            A mark behind the copies.
        """
        # Copies of one channel follow one another. So a gradient never waits for a value that has
        # no room yet.
        channel = "batch" if source is None else reading.phase
        label = (source, *reading)
        mark = self.courier.send_all(sources, ready, targets, free, channel, label, adds)
        slot.arrived.append(mark)
        return mark

    def place(self, index: int, phase: str, micro_batch: int) -> Place:
        """Return where a pass of a stage is: its device, and the layer that runs now."""
        stage = self.stages[index]
        count, layer = len(self.stages), stage.trail.layer
        return Place(micro_batch, phase, index, count, stage.device, layer, unit=self._unit)

    def names(self) -> list[str]:
        """Return the stages' names, such as "segment 0 of 2 on cuda:0"."""
        count = len(self.stages)
        return [f"segment {i} of {count} on {stage.device}" for i, stage in enumerate(self.stages)]

    def notes(self, attribute: str) -> dict[str, str]:
        """Return by stage's name what an attribute such as ``compiled`` says; no empty ones."""
        found = [getattr(stage, attribute) for stage in self.stages]
        return {name: note for name, note in zip(self.names(), found, strict=True) if note}

    def warn_of_eager_stages(self) -> None:
        """Warn of stages on GPUs whose passes could not be recorded."""
        for place, why in self.notes("not_recorded_because").items():
            warn(f"{place} runs without CUDA graphs, which takes the host more time: {why}")
