"""A segment of an inference pipeline, with room for the batches that are in it at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.devices import Lane, Mark
from placer.executor.engine.weak_methods import weakly
from placer.executor.segments import MicroBatch, Segment
from placer.executor.stage_errors import Trail


@dataclass
class Slot:
    """Room for one batch in a segment.

    Attributes:
        inputs: static tensors, or numbers, by name.
        outputs: what the segment made of them, by name.
        run: runs or replays the segment.
        over: when all that used the slot is done.
    """

    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    run: Callable[[], None] = lambda: None
    over: list[Mark] = field(default_factory=list)


@dataclass
class Stage:
    """A segment with its border.

    Attributes:
        segment: its layers.
        reads: names of the values that come from elsewhere.
        writes: for each value that leaves: the stages that read it; none where it is a result
            alone.
        count: how many slots it has once the shape has come twice.
        slots: those that there are.
        not_recorded_because: why it runs without a CUDA graph; empty where it has one, or may get
            one.
        compiled: what torch.compile gained; empty where it does not run.
        not_compiled_because: why not, where it was asked for.
        number: of what it reads, a number that is another one for every batch; None if there is
            none.
        trail: is told which layer runs.
    """

    segment: Segment
    reads: tuple[str, ...]
    writes: dict[str, list[int]]
    count: int = 2
    slots: list[Slot] = field(default_factory=list)
    not_recorded_because: str = ""
    compiled: str = ""
    not_compiled_because: str = ""
    number: str | None = None
    trail: Trail = field(default_factory=Trail)

    @cached_property
    def sent(self) -> dict[int, list[str]]:
        """What leaves, by the stage that reads it."""
        sent: dict[int, list[str]] = {}
        for name, readers in self.writes.items():
            for reader in readers:
                sent.setdefault(reader, []).append(name)
        return sent

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.segment.device

    @property
    def obstacle(self) -> str:
        """What forbids to record or to compile it, whatever its layers do; empty if nothing does."""
        number = self.number
        return (
            ""
            if number is None
            else f"it reads {number!r}, a number that depends on values of tensors"
        )

    def open(self) -> Slot:
        """One slot more, its inputs like those of the first."""
        slot = Slot()
        slot.run = weakly(self._compute, slot)
        for name, value in self.slots[0].inputs.items() if self.slots else ():
            slot.inputs[name] = value.clone() if isinstance(value, Tensor) else value
        slot.over = [Lane(self.device, caller=True).mark()]
        self.slots.append(slot)
        return slot

    def record(self) -> None:
        """Turn every slot's work into a CUDA graph, where the device has them and the layers allow
        it.
        """
        if self.device.type != "cuda":
            return
        for step in self.segment.steps:
            if step.foreign:
                self.not_recorded_because = (
                    f"layer {step.layer.name!r} changes state that is on another device"
                )
                return
        if self.obstacle:
            self.not_recorded_because = self.obstacle
            return
        try:
            # Each has memory of its own: in a shared one the next slot's pass may overwrite what
            # this one made, while that is still on its way.
            replays = [devices.record([slot.run], self.device)[0] for slot in self.slots]
        except devices.NotRecordable as error:
            self.not_recorded_because = f"layer {self.trail.layer!r}: {error}"
            return
        for slot, replay in zip(self.slots, replays, strict=True):
            slot.run = replay

    def _compute(self, slot: Slot) -> None:
        values = MicroBatch(slot.inputs.keys(), slot.inputs.values(), self.trail)
        self.segment.run(values)
        slot.outputs = {name: values.read(name, self.device) for name in self.writes}
