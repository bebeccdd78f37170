"""The segments of one capture for inference: batches take the slots of each in turn, and each has
its own time in all.

    inputs (static)  ──▶ segment ──▶ outputs (static)  ──▶ inputs of the segments that read them, wherever they are

On a GPU every slot of a segment is one CUDA graph, recorded when a shape comes for the second time:
a shape that comes once, as a last and smaller batch does, would cost more to record than to run. A
segment that reads a value made d segments before it has d + 1 slots, so that nothing has to wait
for room while every segment takes its turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.capture.layers import LayerGraph
from placer.capture.pytrees import Structure
from placer.devices import Courier, Lane, Mark
from placer.executor.engine.compiled_segments import Backend
from placer.executor.engine.pass_trace import Issued
from placer.executor.inference.compiled_streams import compile_stage
from placer.executor.inference.stream_stage import Slot, Stage
from placer.executor.segments import Segment, StateLookup, segments, taken_in_turn
from placer.executor.stage_errors import Place, raise_explained
from placer.executor.state.segment_state import Replicas, mutated
from placer.executor.state.state_copies import Copies
from placer.utils.user_warnings import warn


@dataclass(eq=False)
class Passage:
    """A batch on its way through the stages.

    Attributes:
        number: which batch of its stream it is.
        turn: which batch of its pipeline it is: this decides its slots.
        inputs: those that the model returns, by name, as they were given.
        stage: the next one that it goes through.
        arrived: for each stage, when what it reads is there.
        results: by name, on the output device.
        done: when they are there.
    """

    number: int
    turn: int
    inputs: dict[str, Any]
    stage: int = 0
    arrived: dict[int, list[Mark]] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    done: list[Mark] = field(default_factory=list)


class InferencePipeline:
    """The stages of one capture, for batches of one shape.

    Args:
        graph: of the model.
        places: the device of every layer.
        outputs: structure of the model's result.
        target: where results go.
        lookup: the tensors of a layer's state, as the model has them.
        lanes: of every device; those that are missing are added.
        courier: for the copies.
        compile: the backend of torch.compile, for segments that it makes faster; None to leave them
            as they are.

    Attributes:
        graph: of the model.
        outputs: structure of the model's result.
        stages: in order.
        in_turn: whether a batch must be through before the next one enters.
        is_known: whether a batch has gone through all stages, so that every value's shape is known.
        trace: a list that collects every pass; None, as it is at first, to collect none.
    """

    def __init__(
        self,
        graph: LayerGraph,
        places: Sequence[torch.device],
        outputs: Structure,
        target: torch.device,
        lookup: StateLookup,
        copies: Copies,
        lanes: dict[torch.device, Lane],
        courier: Courier,
        compile: Backend | None = None,
    ) -> None:
        self.graph = graph
        self._backend = compile
        self.trace: list[Any] | None = None
        self.outputs = outputs
        self._target = target
        self._state = Replicas(graph, lookup, copies)
        parts = segments(graph, places, self._state.lookup)
        self.in_turn = taken_in_turn(parts) is not None
        self.stages = _stages(graph, parts)
        for stage in self.stages:
            lanes.setdefault(stage.device, devices.shared_lane(stage.device))
            stage.open()
        self._lanes = lanes
        self._courier = courier
        self._readers = {
            name: [index for index, stage in enumerate(self.stages) if name in stage.reads]
            for name in graph.inputs
        }
        self._is_pure = not any(layer.mutated or layer.random for layer in graph.layers)
        self._turns = 0
        self.is_known = False
        self._is_open = False

    @property
    def leaves_nothing(self) -> bool:
        """Whether a recorded pass may turn out to be of no use: it changes nothing and reads
        nothing but the model.
        """
        return (
            self._is_open
            and self._is_pure
            and not any(stage.not_recorded_because for stage in self.stages)
        )

    def compiling(self) -> dict[str, tuple[str, str]]:
        """By segment that was to be compiled: what was gained, or else why it is not."""
        return {
            self._named(index): (stage.compiled, stage.not_compiled_because)
            for index, stage in enumerate(self.stages)
            if stage.compiled or stage.not_compiled_because
        }

    def _named(self, index: int) -> str:
        return f"segment {index} of {len(self.stages)} on {self.stages[index].device}"

    def is_current(self, lookup: StateLookup) -> bool:
        """Whether copies of the model's state are up to date, and the state is where it was."""
        return self._state.is_current(lookup)

    def refresh(self, lookup: StateLookup) -> bool:
        """Bring copies of the model's state up to date; False where the state is no longer where it
        was.
        """
        return self._state.refresh(lookup)

    def enter(self, number: int, tensors: Sequence[Any]) -> Passage:
        """Take a batch in: what its inputs are is read, in the order of the caller's own work,
        before this returns.

        Args:
            number: which batch it is.
            tensors: the flattened inputs.
        """
        if self.is_known and not self._is_open:
            self._open()
        given = dict(zip(self.graph.inputs, tensors, strict=True))
        passage = Passage(
            number, self._turns, {name: given[name] for name in self.graph.outputs if name in given}
        )
        self._turns += 1
        for name, value in given.items():
            caller = (
                Lane(devices.location(value), caller=True) if isinstance(value, Tensor) else None
            )
            ready = caller.mark() if caller is not None else None
            for reader in self._readers[name]:
                taken = (
                    devices.staged(value, self.stages[reader].device)
                    if caller is not None
                    else value
                )
                mark = self._deliver(passage, {name: taken}, ready, None, reader)
                if caller is not None and taken is value:
                    caller.wait(mark)
        return passage

    def is_through(self, passage: Passage) -> bool:
        """Whether the batch's last segment was issued."""
        return passage.stage == len(self.stages)

    def advance(self, passage: Passage) -> None:
        """Issue the batch's next segment, and what becomes of its values.

        Raises:
            StageError: a layer failed.
        """
        index, stage = passage.stage, self.stages[passage.stage]
        slot, lane = self._slot(index, passage), self._lanes[stage.device]
        lane.wait(*passage.arrived.pop(index, []), *slot.over)
        timed = self.trace is not None
        began = lane.mark(timed=True) if timed else None
        with lane:
            self._run(stage, slot, passage)
        ended = lane.mark(timed=timed)
        if self.trace is not None:
            self.trace.append(Issued(stage.device, index, "forward", passage.number, began, ended))
        slot.over = [ended]
        for reader, names in stage.sent.items():
            values = {name: slot.outputs[name] for name in names}
            slot.over.append(self._deliver(passage, values, ended, index, reader))
        for name in stage.writes:
            if name in self.graph.outputs:
                slot.over.append(self._bring_home(passage, name, slot.outputs[name], ended, index))
        passage.stage += 1
        self.is_known |= self.is_through(passage)

    def leaves(self, passage: Passage) -> list[Any]:
        """What the model returns for the batch, flattened; the caller's work on it starts when it
        is there.
        """
        self._await(passage)
        leaves = []
        for name in self.graph.outputs:
            value = passage.results[name] if name in passage.results else passage.inputs[name]
            leaves.append(devices.move(value, self._target) if isinstance(value, Tensor) else value)
        return leaves

    def drop(self, passage: Passage) -> None:
        """Forget a batch, wherever it is: those who come next in its slots wait for what it has
        issued.
        """
        for index, marks in passage.arrived.items():
            self._slot(index, passage).over += marks
        self._await(passage)

    def _await(self, passage: Passage) -> None:
        Lane(self._target, caller=True).wait(*passage.done)

    def _slot(self, index: int, passage: Passage) -> Slot:
        slots = self.stages[index].slots
        return slots[passage.turn % len(slots)]

    def _run(self, stage: Stage, slot: Slot, passage: Passage) -> None:
        try:
            slot.run()
        except Exception as error:
            count, layer = len(self.stages), stage.trail.layer
            place = Place(
                passage.number, "forward", passage.stage, count, stage.device, layer, unit="batch"
            )
            raise_explained(error, place)

    def _deliver(
        self,
        passage: Passage,
        values: Mapping[str, Any],
        ready: Mark,
        maker: int | None,
        reader: int,
    ) -> Mark:
        """Copy values, which are there at the same time, into the slot of a stage that reads them."""
        slot, place = self._slot(reader, passage), self.stages[reader].device
        tensors = {}
        for name, value in values.items():
            if not isinstance(value, Tensor):
                slot.inputs[name] = value
                continue
            tensors[name] = value
            if name not in slot.inputs:
                slot.inputs[name] = torch.empty_like(value, device=place, requires_grad=False)
                slot.over = [*slot.over, Lane(place, caller=True).mark()]
        if not tensors:
            return None
        statics = [slot.inputs[name] for name in tensors]
        channel = "batch" if maker is None else "forward"
        label = (maker, reader, "forward", passage.number)
        mark = self._courier.send_all(
            list(tensors.values()), ready, statics, slot.over, channel, label
        )
        passage.arrived.setdefault(reader, []).append(mark)
        return mark

    def _bring_home(self, passage: Passage, name: str, value: Any, ready: Mark, maker: int) -> Mark:
        """Copy a result out of its slot, to where results go."""
        if not isinstance(value, Tensor):
            passage.results[name] = value
            return None
        # else the copy would hold the caller up
        pinned = value.is_cuda and self._target.type == "cpu"
        home = torch.empty_like(value, device=self._target, requires_grad=False, pin_memory=pinned)
        free = Lane(self._target, caller=True).mark()
        mark = self._courier.send(
            value, ready, home, free, "result", (maker, None, "forward", passage.number)
        )
        passage.results[name] = home
        passage.done.append(mark)
        return mark

    def _open(self) -> None:
        """A shape comes again: give every stage all its slots, and record them."""
        for place in self._lanes:
            devices.synchronise(place)
        kept = {name: self.graph.state[name].clone() for name in mutated(self.graph)}
        try:
            with devices.keep_random_state(list(self._lanes)):
                for stage in self.stages:
                    while len(stage.slots) < stage.count:
                        stage.open()
                    devices.synchronise(stage.device)
                    if self._backend is not None:
                        compile_stage(stage, self._backend)
                    stage.record()
                    self._warn(stage)
        finally:
            for name, value in kept.items():
                self.graph.state[name].copy_(value)
            for place in self._lanes:
                devices.synchronise(place)
        self._is_open = True

    def _warn(self, stage: Stage) -> None:
        if stage.not_recorded_because:
            place, why = self._named(self.stages.index(stage)), stage.not_recorded_because
            warn(f"{place} runs without CUDA graphs, which takes the host more time: {why}")


def _stages(graph: LayerGraph, parts: Sequence[Segment]) -> list[Stage]:
    """Segments with what passes between them."""
    made_by = {
        name: index
        for index, part in enumerate(parts)
        for step in part.steps
        for name in step.layer.writes
    }
    reads: list[dict[str, None]] = []
    for index, part in enumerate(parts):
        names = [name for step in part.steps for name in step.layer.reads]
        reads.append({name: None for name in names if made_by.get(name) != index})
    stages = []
    for index, part in enumerate(parts):
        distances = [index - made_by.get(name, -1) for name in reads[index]]
        numbers = (name for name in reads[index] if graph.values[name].from_values)
        stage = Stage(
            part,
            tuple(reads[index]),
            _writes(index, made_by, reads, graph),
            max([1, *distances]) + 1,
        )
        stage.number = next(numbers, None)
        stages.append(stage)
    return stages


def _writes(
    index: int, made_by: Mapping[str, int], reads: Sequence[Mapping[str, None]], graph: LayerGraph
) -> dict[str, list[int]]:
    """What a stage's layers make for others, and for which."""
    writes: dict[str, list[int]] = {}
    for name, maker in made_by.items():
        readers = [reader for reader, names in enumerate(reads) if name in names and maker == index]
        if maker == index and (readers or name in graph.outputs):
            writes[name] = readers
    return writes
