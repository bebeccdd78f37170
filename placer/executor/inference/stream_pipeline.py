"""The segments of one capture as stages for inference.

    inputs (static) ──▶ segment ──▶ outputs (static) ──▶ inputs of the stages that read them

On a GPU every slot of a stage is one CUDA graph. It is recorded when a shape comes for the second
time: a shape that comes once, as a last and smaller batch does, would cost more to record than to
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from placer import devices
from placer.capture.layers import LayerGraph
from placer.capture.pytrees import Structure
from placer.devices import Courier, Lane
from placer.executor.engine.compiled_segments import Backend
from placer.executor.engine.slot import Slot
from placer.executor.engine.stage import Stage
from placer.executor.inference.compiled_streams import compile_stage
from placer.executor.inference.stream_engine import Passage, StreamEngine
from placer.executor.segments import Segment, StateLookup, borders, segments, taken_in_turn
from placer.executor.state.segment_state import Replicas, restored
from placer.executor.state.state_copies import Copies


class InferencePipeline:
    """The stages of one capture, for batches of one shape.

    Args:
        graph: of the model.
        places: the device of every layer.
        outputs: structure of the model's result.
        target: the device of the results.
        lookup: the tensors of a layer's state, as the model has them.
        copies: of the model's state, on devices that read it and do not own it.
        lanes: of every device; missing ones are added.
        courier: for the copies.
        compile: the backend of torch.compile, for segments that it makes faster; None to compile
            nothing.

    Attributes:
        graph: of the model.
        outputs: structure of the model's result.
        state: the model's state, as the stages read it.
        stages: in order.
        place: the device of the first layer.
        engine: what issues the passes.
        in_turn: whether a batch must have left all stages before the next one enters.
        is_known: whether a batch has gone through all stages, so that every value's shape is known.
        is_open: whether every stage has all its slots, and they were recorded where they can be.
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
        self.outputs = outputs
        self._backend = compile
        self._lanes = lanes
        self.state = Replicas(graph, lookup, copies)
        parts = segments(graph, places, self.state.lookup)
        self.in_turn = taken_in_turn(parts) is not None
        self.stages = _stages(graph, parts)
        self.place = places[0] if places else target
        for stage in self.stages:
            # All recordings of a device replay in one lane: they share what libraries keep for
            # their stream, such as workspaces of cuBLAS.
            lanes.setdefault(stage.device, devices.shared_lane(stage.device))
            stage.open(Slot())
        self.engine = StreamEngine(self.stages, lanes, courier, graph, target)
        # A call may run ahead of the check of the model only if nothing of it remains.
        self._is_pure = not any(layer.mutated or layer.random for layer in graph.layers)
        self.is_known = False
        self.is_open = False

    @property
    def leaves_nothing(self) -> bool:
        """Whether a batch may be run to no purpose: it changes nothing and reads only the model."""
        is_recorded = not any(stage.not_recorded_because for stage in self.stages)
        return self.is_open and self._is_pure and is_recorded

    def compiling(self) -> dict[str, tuple[str, str]]:
        """Return what torch.compile gained, or why it does not run, by segment that it was for."""
        gains, obstacles = self.engine.notes("compiled"), self.engine.notes("not_compiled_because")
        return {
            place: (gains.get(place, ""), obstacles.get(place, ""))
            for place in self.engine.names()
            if place in gains or place in obstacles
        }

    def enter(self, number: int, tensors: Sequence[Any]) -> Passage:
        """Take a batch in; before the second one the stages are recorded.

        Args:
            number: which batch of its stream it is.
            tensors: the flattened inputs.
        """
        if self.is_known and not self.is_open:
            self._open()
        return self.engine.enter(number, tensors)

    def advance(self, passage: Passage) -> None:
        """Issue the batch's next stage.

        Raises:
            StageError: a layer failed.
        """
        self.engine.advance(passage)
        # Values get their static memory as they come for the first time.
        self.is_known |= self.engine.is_through(passage)

    def _open(self) -> None:
        """Give every stage all its slots, and record them."""
        for place in self._lanes:
            devices.synchronise(place)
        try:
            # Recording runs the passes.
            with restored(self.graph, self._lanes):
                for stage in self.stages:
                    while len(stage.slots) < stage.count:
                        stage.open(Slot())
                    devices.synchronise(stage.device)
                    if self._backend is not None:
                        compile_stage(stage, self._backend)
                    stage.record()
        finally:
            for place in self._lanes:
                devices.synchronise(place)
        self.engine.warn_of_eager_stages()
        self.is_open = True


def _stages(graph: LayerGraph, parts: Sequence[Segment]) -> list[Stage[Slot]]:
    """Return segments with the values that cross their borders."""
    reads, writes = borders(parts, ())
    made_by = {name: index for index, names in enumerate(writes) for name in names}
    stages = []
    for index, part in enumerate(parts):
        made = [name for step in part.steps for name in step.layer.writes]
        for name in made:
            if name in graph.outputs:
                writes[index].setdefault(name, [])
        numbers = (name for name in reads[index] if graph.values[name].from_values)
        stage = Stage[Slot](part, reads[index], writes[index], number=next(numbers, None))
        # An input of the model comes from before stage 0.
        distances = [index - made_by.get(name, -1) for name in reads[index]]
        stage.count = max([1, *distances]) + 1
        stages.append(stage)
    return stages
