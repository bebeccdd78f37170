"""Exact simulation of steps: passes in plan order, with concurrent transfers.

For the pass (s, phase, m) of stage s and micro-batch m on device d, in the order of the plan::

    start(pass)         = max of the end of the previous pass on d and of its inputs below
    end(pass)           = start + forward(s), or backward(s), or for a split backward pass
                          backward(s) - weights(s) and then weights(s)
    forward (s, m)      needs the values of every transfer t to s. Each is sent when
                          - its stage's forward pass of m has ended,
                          - the lane (device of t.source, d, forward) is free, and
                          - s has room: micro-batch m - in_flight(s) has left s
    backward (s, m)     needs the gradients of every transfer from s. Each is sent when
                          - the reading stage's backward pass of m has ended, and
                          - the lane (its device, d, backward) is free.
                        A stage without incoming gradients needs the loss, which is the end
                        of the last stage's forward pass of m

A lane carries one transfer at a time, in the order of the passes that cause them. Execution works
likewise: a stage has one buffer per micro-batch in flight, and copies run concurrently with
computations.

Consecutive steps share devices, lanes and buffers, and nothing else connects them::

    first pass on d     also waits for the optimizer on d, after d's last pass of the step before
    first transfer      also waits until its lane has carried the last one of the step before
    forward (s, m)      with m < in_flight(s): s has room when the previous step's micro-batch in
                        the same buffer, the last one equal to m modulo in_flight(s), has left
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from placer.errors import InputError
from placer.schedule.passes import (
    Lane,
    Phase,
    Pipeline,
    Plan,
    Timeline,
    TimelineTask,
    TimelineTransfer,
    Transfer,
    most_held,
)


def simulate(pipeline: Pipeline, plan: Plan, steps: int = 1) -> Timeline:
    """Return the timeline of one step, or of several consecutive ones.

    Args:
        pipeline: the stages' times, and the transfers between them.
        plan: the order of passes, for the same stages on the same devices.
        steps: number of consecutive steps (default 1), starting with idle devices; micro-batches
            are numbered consecutively.

    Raises:
        InputError: if ``steps`` is below 1.
    """
    if steps < 1:
        raise InputError(f"steps is {steps}: give a number of consecutive steps, 1 or more")
    row = StepsInARow(pipeline, plan, keep=True)
    ends = [row.play() for _ in range(steps)]
    busy = dict.fromkeys(sorted(set(pipeline.places)), 0.0)
    for task in row.tasks:  # by start on each device
        busy[task.device] += task.end_ms - task.start_ms
    last: Phase = "weights" if plan.split else "backward"
    return Timeline(
        step_ms=row.passes_end_ms,
        tasks=tuple(sorted(row.tasks, key=lambda task: (task.start_ms, task.stage))),
        transfers=tuple(sorted(row.transfers, key=lambda transfer: transfer.start_ms)),
        busy_ms=busy,
        in_flight=most_held(plan.issue, len(pipeline.places), last),
        ends_ms=tuple(ends),
    )


def step_ms(pipeline: Pipeline, plan: Plan) -> float:
    """Return the time of an isolated step's passes in ms, without building the timeline."""
    row = StepsInARow(pipeline, plan)
    row.play()
    return row.passes_end_ms


class StepsInARow:
    """A simulator of consecutive steps, each starting from the state that the previous one left.

    Args:
        pipeline: as for ``simulate``.
        plan: as for ``simulate``.
        keep: whether tasks and transfers are recorded.

    Attributes:
        tasks: the recorded passes.
        transfers: the recorded transfers between devices.
        passes_end_ms: the latest end of a pass.
    """

    def __init__(self, pipeline: Pipeline, plan: Plan, *, keep: bool = False) -> None:
        self._places, self._plan, self._keep = pipeline.places, plan, keep
        backward = pipeline.backward_ms
        if plan.split:
            backward = tuple(
                whole - half for whole, half in zip(backward, pipeline.weight_grad_ms, strict=True)
            )
        self._times = {
            "forward": pipeline.forward_ms,
            "backward": backward,
            "weights": pipeline.weight_grad_ms,
        }
        self._last = "weights" if plan.split else "backward"
        self._optimizer = pipeline.optimizer_by_device()
        stages = range(len(pipeline.places))
        self._inputs: list[list[Transfer]] = [[] for _ in stages]
        self._loss = [True] * len(stages)
        # for each lane, the end of its last transfer
        self._lanes: dict[Lane, float] = {}
        for transfer in sorted(pipeline.transfers):
            self._inputs[transfer.target].append(transfer)
            source, target = pipeline.places[transfer.source], pipeline.places[transfer.target]
            self._lanes[source, target, "forward"] = 0.0
            if transfer.gradient_ms is not None:
                self._loss[transfer.source] = False
                self._lanes[target, source, "backward"] = 0.0
        self._forwards = [[0.0] * plan.chunks for _ in stages]
        self._finals = [[0.0] * plan.chunks for _ in stages]
        self._landed = [[0.0] * plan.chunks for _ in stages]
        self._free = dict.fromkeys(sorted(set(pipeline.places)), 0.0)
        # by stage and micro-batch, the previous user of its buffer
        self._before = [self._same_buffer(stage) for stage in stages]
        self._steps = 0
        self.tasks: list[TimelineTask] = []
        self.transfers: list[TimelineTransfer] = []
        self.passes_end_ms = 0.0

    def _same_buffer(self, stage: int) -> list[int]:
        """Return for each micro-batch the previous user of its buffer.

        If that number is not smaller, it belongs to the previous step.
        """
        held, chunks = min(self._plan.in_flight[stage], self._plan.chunks), self._plan.chunks
        return [
            m - held if m >= held else m + (chunks - 1 - m) // held * held for m in range(chunks)
        ]

    def play(self) -> float:
        """Simulate another step and return the end of its last pass or optimizer step, in ms."""
        for landed in self._landed:
            landed[:] = [-inf] * self._plan.chunks
        for stage, phase, micro_batch in self._plan.issue:
            self._run(stage, phase, micro_batch)
        self._steps += 1
        self.passes_end_ms = max(self._free.values())
        for device, time_ms in self._optimizer.items():
            self._free[device] += time_ms
        return max(self._free.values())

    def busiest_ms(self) -> float:
        """Return the busiest device's work in a step, optimizer included, in ms.

        This is a lower bound of the steady-state step.
        """
        work = dict.fromkeys(self._free, 0.0) | self._optimizer
        for stage, phase, _ in self._plan.issue:
            work[self._places[stage]] += self._times[phase][stage]
        return max(work.values())

    @property
    def state(self) -> list[float]:
        """Return the state that the next step starts from.

        It consists of the times at which devices, lanes and shared buffers became free.
        """
        ends = [*self._free.values(), *self._lanes.values()]
        if self._plan.training:
            for stage, inputs in enumerate(self._inputs):
                if inputs:
                    finals = self._finals[stage]
                    ends += [
                        finals[before]
                        for m, before in enumerate(self._before[stage])
                        if before >= m
                    ]
        return ends

    def begin(self, state: Sequence[float]) -> None:
        """Set the state that the next step starts from, in the form of ``state``."""
        ends = iter(state)
        self._free = {device: next(ends) for device in self._free}
        self._lanes = {lane: next(ends) for lane in self._lanes}
        if self._plan.training:
            for stage, inputs in enumerate(self._inputs):
                for m, before in enumerate(self._before[stage] if inputs else ()):
                    if before >= m:
                        self._finals[stage][before] = next(ends)

    def _run(self, stage: int, phase: Phase, micro_batch: int) -> None:
        device = self._places[stage]
        start = max(self._free[device], self._ready(stage, phase, micro_batch))
        end = self._free[device] = start + self._times[phase][stage]
        if phase == "forward":
            self._forwards[stage][micro_batch] = end
        if phase == self._last:
            self._finals[stage][micro_batch] = end
        if phase == "backward":
            self._send_gradients(stage, micro_batch, end)
        if self._keep:
            self.tasks.append(
                TimelineTask(stage, phase, self._number(micro_batch), start, end, device)
            )

    def _number(self, micro_batch: int) -> int:
        """Return the number of a micro-batch, counted over all steps."""
        return self._steps * self._plan.chunks + micro_batch

    def _ready(self, stage: int, phase: Phase, micro_batch: int) -> float:
        """Return when all inputs of a pass are present, regardless of its device."""
        if phase == "weights":
            return -inf
        if phase == "backward":
            # the loss is complete when the last stage has run forward
            lost = self._forwards[-1][micro_batch] if self._loss[stage] else -inf
            return max(lost, self._landed[stage][micro_batch])
        if not self._inputs[stage]:
            return -inf
        room = (
            self._finals[stage][self._before[stage][micro_batch]] if self._plan.training else -inf
        )
        return max(
            self._carry(
                t.source,
                stage,
                "forward",
                micro_batch,
                max(self._forwards[t.source][micro_batch], room),
                t[2],
            )
            for t in self._inputs[stage]
        )

    def _send_gradients(self, stage: int, micro_batch: int, made: float) -> None:
        for transfer in self._inputs[stage]:
            if transfer.gradient_ms is not None:
                there = self._carry(
                    stage, transfer.source, "backward", micro_batch, made, transfer.gradient_ms
                )
                self._landed[transfer.source][micro_batch] = max(
                    self._landed[transfer.source][micro_batch], there
                )

    def _carry(
        self, source: int, target: int, phase: Phase, micro_batch: int, ready: float, time_ms: float
    ) -> float:
        """Return the end of a transfer that may start at ``ready``."""
        lane = self._places[source], self._places[target], phase
        start = max(ready, self._lanes[lane])
        end = self._lanes[lane] = start + time_ms
        if self._keep:
            self.transfers.append(
                TimelineTransfer(source, target, phase, self._number(micro_batch), start, end)
            )
        return end
