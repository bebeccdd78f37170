"""A segment with the values that cross its border, and its slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Generic, TypeVar

from torch import Tensor

from placer import devices
from placer.devices import Lane
from placer.executor.engine.slot import Slot
from placer.executor.engine.weak_methods import weakly
from placer.executor.segments import MicroBatch, Segment
from placer.executor.stage_errors import Trail
from placer.schedule import Phase

AnySlot = TypeVar("AnySlot", bound=Slot)


class Stage(Generic[AnySlot]):
    """A segment that micro-batches go through, each in a slot.

    Args:
        segment: its layers.
        reads: names of the values that other stages or the caller send.
        writes: for each value that leaves: the stages that read it; empty for a mere result.
        trail: notes which layer runs; a new one if None.
        number: a value among ``reads`` that is a number and differs from batch to batch. A recorded
            pass would keep the first one. None if it has none.

    Attributes:
        device: where the segment runs.
        slots: in the order in which micro-batches take them.
        count: how many slots to open before the passes are recorded.
        is_recorded: whether the passes are CUDA graphs.
        not_recorded_because: why they cannot be; empty where they are, or may still be recorded, or
            no GPU runs them.
        compiled: what torch.compile gained; empty where it does not run.
        not_compiled_because: why it is not compiled, where that was asked for.
    """

    def __init__(
        self,
        segment: Segment,
        reads: Sequence[str],
        writes: Mapping[str, Sequence[int]],
        trail: Trail | None = None,
        number: str | None = None,
    ) -> None:
        self.segment = segment
        self.device = segment.device
        self.reads = tuple(reads)
        self.writes = dict(writes)
        # Eager calls share one trail among all stages, as a micro-batch runs in all of them.
        self.trail = Trail() if trail is None else trail
        self.number = number
        self.slots: list[AnySlot] = []
        self.count = 1
        self.is_recorded = False
        self.not_recorded_because = ""
        self.compiled = ""
        self.not_compiled_because = ""

    @cached_property
    def sent(self) -> dict[int, list[str]]:
        """The names of the values that leave, by the stage that reads them."""
        sent: dict[int, list[str]] = {}
        for name, readers in self.writes.items():
            for reader in readers:
                sent.setdefault(reader, []).append(name)
        return sent

    def slot(self, micro_batch: int) -> AnySlot:
        """Return the slot that a micro-batch goes through."""
        return self.slots[micro_batch % len(self.slots)]

    def all_slots(self) -> list[AnySlot]:
        """Return every slot, in the order in which they are recorded."""
        return self.slots

    def open(self, slot: AnySlot) -> AnySlot:
        """Add a slot: its passes run eagerly, and what it lacks of the first one's inputs is added.

        Args:
            slot: holds the inputs that are known, such as a cache.
        """
        slot.passes = self.eager_passes(slot)
        for name, value in self.slots[0].inputs.items() if self.slots else ():
            if name not in slot.inputs:
                slot.inputs[name] = value.clone() if isinstance(value, Tensor) else value
        slot.free = [Lane(self.device, caller=True).mark()]
        self.slots.append(slot)
        return slot

    def eager_passes(self, slot: AnySlot) -> dict[Phase, Callable[[], None]]:
        """Return what runs each pass of a slot operation by operation."""
        return {"forward": weakly(self.forward, slot)}

    def forward(self, slot: AnySlot) -> None:
        """Compute the segment in a slot."""
        values = MicroBatch(slot.inputs.keys(), slot.inputs.values(), self.trail)
        self.segment.run(values)
        slot.outputs = {name: values.read(name, self.device) for name in self.writes}

    def record(self) -> None:
        """Turn the passes of every slot into CUDA graphs, if the device and the layers allow it."""
        # A stand-in does its work at once: there is nothing to record.
        if self.device.type != "cuda":
            return
        self.not_recorded_because = self.recording_obstacle()
        if self.not_recorded_because:
            return
        try:
            self.record_slots()
            self.is_recorded = True
        except devices.NotRecordable as error:
            self.not_recorded_because = f"layer {self.trail.layer!r}: {error}"
            # Some slots may be recorded already, but a stage is recorded as a whole or not at all.
            for slot in self.all_slots():
                slot.passes = self.eager_passes(slot)

    def recording_obstacle(self) -> str:
        """Return what is known to forbid a recording; an empty string if nothing is."""
        for step in self.segment.steps:
            if step.foreign:
                return f"layer {step.layer.name!r} changes state that is on another device"
        return self.number_obstacle

    @property
    def number_obstacle(self) -> str:
        """Why neither recorded nor compiled passes would be right; an empty string if they are."""
        if self.number is None:
            return ""
        return f"it reads {self.number!r}, a number that depends on values of tensors"

    def record_slots(self) -> None:
        """Record the passes of every slot.

        Raises:
            devices.NotRecordable: a pass cannot be recorded.
        """
        # Each slot has memory of its own: in a shared one the next slot's pass may overwrite what
        # this one made, while that is still on its way.
        replays = [devices.record([slot.passes["forward"]], self.device)[0] for slot in self.slots]
        for slot, replay in zip(self.slots, replays, strict=True):
            slot.passes = {"forward": replay}
