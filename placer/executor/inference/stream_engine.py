"""Batches of streams on their way through the stages: from the caller's memory to the results.

    inputs ──copy──▶ slot of stage 0 ──copy──▶ slot of stage 1 ──copy──▶ result, in new memory

A copy leaves right behind the pass that made its values, into a slot of the stage that reads them.
A stage that reads a value made d stages before has d + 1 slots, so that this slot is free by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.capture.layers import LayerGraph
from placer.devices import Courier, Lane, Mark
from placer.executor.engine.engine import Engine
from placer.executor.engine.slot import Slot
from placer.executor.engine.stage import Stage
from placer.schedule import Pass


@dataclass(eq=False)
class Passage:
    """A batch on its way through the stages.

    Attributes:
        number: its number in its stream.
        turn: its number among all batches of the stages, which decides its slots.
        inputs: those that the model returns, by name, as the caller gave them.
        stage: the next one that it goes through.
        results: by name, on the output device.
        done: marks behind the copies of the results.
    """

    number: int
    turn: int
    inputs: dict[str, Any]
    stage: int = 0
    results: dict[str, Any] = field(default_factory=dict)
    done: list[Mark] = field(default_factory=list)


class StreamEngine(Engine[Stage[Slot]]):
    """An engine whose batches enter and leave one by one.

    Args:
        stages: in order, each with a slot.
        lanes: of each device.
        courier: for the copies.
        graph: of the model.
        target: the device of the results.
    """

    def __init__(
        self,
        stages: Sequence[Stage[Slot]],
        lanes: Mapping[torch.device, Lane],
        courier: Courier,
        graph: LayerGraph,
        target: torch.device,
    ) -> None:
        super().__init__(stages, lanes, courier, unit="batch")
        self._inputs = graph.inputs
        self._outputs = graph.outputs
        self._target = target
        self._turns = 0
        self._readers = {
            name: [index for index, stage in enumerate(stages) if name in stage.reads]
            for name in graph.inputs
        }

    def enter(self, number: int, tensors: Sequence[Any]) -> Passage:
        """Take a batch in; the inputs are read in the order of the caller's own work.

        Args:
            number: which batch of its stream it is.
            tensors: the flattened inputs.
        """
        given = dict(zip(self._inputs, tensors, strict=True))
        returned = {name: given[name] for name in self._outputs if name in given}
        passage = Passage(number, self._turns, returned)
        # Streams that share these stages take turns: their batches are counted together.
        self._turns += 1
        for name, value in given.items():
            caller = (
                Lane(devices.location(value), caller=True) if isinstance(value, Tensor) else None
            )
            ready = caller.mark() if caller is not None else None
            # Straight to every stage that reads it, so that no device passes it on.
            for reader in self._readers[name]:
                stage = self.stages[reader]
                taken = devices.staged(value, stage.device) if caller is not None else value
                reading = Pass(reader, "forward", number)
                slot = stage.slot(passage.turn)
                mark = self.deliver({name: taken}, ready, None, reading, slot)
                # the caller may write to the input as soon as this returns
                if caller is not None and taken is value:
                    caller.wait(mark)
        return passage

    def is_through(self, passage: Passage) -> bool:
        """Return whether the batch's last stage was issued."""
        return passage.stage == len(self.stages)

    def advance(self, passage: Passage) -> None:
        """Issue the batch's next stage, and the copies of what it makes.

        Raises:
            StageError: a layer failed.
        """
        index, stage = passage.stage, self.stages[passage.stage]
        self.issue(Pass(index, "forward", passage.number), passage.turn)
        slot = stage.slot(passage.turn)
        for name in stage.writes:
            if name in self._outputs:
                slot.free.append(self._bring_home(passage, name, slot))
        passage.stage += 1

    def leaves(self, passage: Passage) -> list[Any]:
        """Return the flattened result of a batch, for which the caller's next work waits."""
        self._await(passage)
        leaves = []
        for name in self._outputs:
            value = passage.results[name] if name in passage.results else passage.inputs[name]
            leaves.append(devices.move(value, self._target) if isinstance(value, Tensor) else value)
        return leaves

    def drop(self, passage: Passage) -> None:
        """Forget a batch, wherever it is."""
        # the next batches in its slots wait for the copies that were issued for it
        for stage in self.stages[passage.stage :]:
            slot = stage.slot(passage.turn)
            slot.free, slot.arrived = [*slot.free, *slot.arrived], []
        self._await(passage)

    def _await(self, passage: Passage) -> None:
        Lane(self._target, caller=True).wait(*passage.done)

    def _bring_home(self, passage: Passage, name: str, slot: Slot) -> Mark:
        """Copy a result out of its slot, into new memory on the output device."""
        value = slot.outputs[name]
        if not isinstance(value, Tensor):
            passage.results[name] = value
            return None
        # A copy to memory of the host that is not pinned would hold the caller up.
        pinned = value.is_cuda and self._target.type == "cpu"
        home = torch.empty_like(value, device=self._target, requires_grad=False, pin_memory=pinned)
        free = Lane(self._target, caller=True).mark()
        label = (passage.stage, None, "forward", passage.number)
        mark = self.courier.send(value, slot.made, home, free, "result", label)
        passage.results[name] = home
        passage.done.append(mark)
        return mark
