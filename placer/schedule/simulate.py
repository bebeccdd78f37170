"""The exact time of a step: passes in their order, transfers beside them, a lane for each way between two devices.

Of pass (s, phase, m), stage s, micro-batch m, on device d, in the order of the plan::

    start(pass)         = max of the end of the pass before on d, and of what it waits for
    end(pass)           = start + forward(s), backward(s), or, in two halves, backward(s) - weights(s) and weights(s)
    forward (s, m)      waits for the values of every transfer t to s: they leave when their stage's forward pass of m
                        has ended, the lane (device of t.source, d, forward) is free, and s has room: the last pass of
                        micro-batch m - in_flight(s) through s has ended
    backward (s, m)     waits for the gradients of every transfer from s: each leaves when the backward pass of m of the
                        stage that reads has ended and the lane (its device, d, backward) is free; a stage that gets no
                        gradients waits for the loss, the end of the last stage's forward pass of m

A lane carries one transfer at a time, in the order of the passes that bring them about. So it is in execution:
a stage has as many buffers as it has micro-batches in flight, and copies run beside computations.
"""

from __future__ import annotations

from collections import defaultdict

from placer.schedule.passes import Phase, Pipeline, Plan, Timeline, TimelineTask, TimelineTransfer, Transfer, most_held


def simulate(pipeline: Pipeline, plan: Plan) -> Timeline:
    """The timeline of a step.

    Args:
        pipeline: the stages' times and what passes between them.
        plan: the order of passes, for the same stages on the same devices.
    """
    step = _Step(pipeline, plan, keep=True)
    busy = dict.fromkeys(sorted(set(pipeline.places)), 0.0)
    for task in step.tasks:  # by start on each device
        busy[task.device] += task.end_ms - task.start_ms
    last: Phase = "weights" if plan.split else "backward"
    return Timeline(
        step_ms=step.step_ms,
        tasks=tuple(sorted(step.tasks, key=lambda task: (task.start_ms, task.stage))),
        transfers=tuple(sorted(step.transfers, key=lambda transfer: transfer.start_ms)),
        busy_ms=busy,
        in_flight=most_held(plan.issue, len(pipeline.places), last),
    )


def step_ms(pipeline: Pipeline, plan: Plan) -> float:
    """How long a step takes, in milliseconds: ``simulate`` without the timeline."""
    return _Step(pipeline, plan, keep=False).step_ms


class _Step:
    """A step as it is played, pass by pass."""

    def __init__(self, pipeline: Pipeline, plan: Plan, *, keep: bool) -> None:
        self._places, self._plan, self._keep = pipeline.places, plan, keep
        backward = pipeline.backward_ms
        if plan.split:
            backward = tuple(whole - half for whole, half in zip(backward, pipeline.weights_ms, strict=True))
        self._times = {"forward": pipeline.forward_ms, "backward": backward, "weights": pipeline.weights_ms}
        self._last = "weights" if plan.split else "backward"
        stages = range(len(pipeline.places))
        self._inputs: list[list[Transfer]] = [[] for _ in stages]
        self._loss = [True] * len(stages)
        for transfer in sorted(pipeline.transfers):
            self._inputs[transfer.target].append(transfer)
            if transfer.gradient_ms is not None:
                self._loss[transfer.source] = False
        self._forwards = [[0.0] * plan.chunks for _ in stages]
        self._finals = [[0.0] * plan.chunks for _ in stages]
        self._landed = [[0.0] * plan.chunks for _ in stages]
        self._lanes: dict[tuple[int, int, Phase], float] = defaultdict(float)
        self._free: dict[int, float] = defaultdict(float)
        self.tasks: list[TimelineTask] = []
        self.transfers: list[TimelineTransfer] = []
        for stage, phase, micro_batch in plan.issue:
            self._run(stage, phase, micro_batch)
        self.step_ms = max(self._free.values())

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
            self.tasks.append(TimelineTask(stage, phase, micro_batch, start, end, device))

    def _ready(self, stage: int, phase: Phase, micro_batch: int) -> float:
        """When all that a pass waits for is there, beside its device."""
        if phase == "weights":
            return 0.0
        if phase == "backward":
            lost = self._forwards[-1][micro_batch] if self._loss[stage] else 0.0
            return max(lost, self._landed[stage][micro_batch])
        if not self._inputs[stage]:
            return 0.0
        before = micro_batch - self._plan.in_flight[stage]
        room = self._finals[stage][before] if self._plan.training and before >= 0 else 0.0
        return max(
            self._carry(t.source, stage, "forward", micro_batch, max(self._forwards[t.source][micro_batch], room), t[2])
            for t in self._inputs[stage]
        )

    def _send_gradients(self, stage: int, micro_batch: int, made: float) -> None:
        for transfer in self._inputs[stage]:
            if transfer.gradient_ms is not None:
                there = self._carry(stage, transfer.source, "backward", micro_batch, made, transfer.gradient_ms)
                self._landed[transfer.source][micro_batch] = max(self._landed[transfer.source][micro_batch], there)

    def _carry(self, source: int, target: int, phase: Phase, micro_batch: int, ready: float, time_ms: float) -> float:
        """When a transfer that may start at some time is done."""
        lane = self._places[source], self._places[target], phase
        start = max(ready, self._lanes[lane])
        end = self._lanes[lane] = start + time_ms
        if self._keep:
            self.transfers.append(TimelineTransfer(source, target, phase, micro_batch, start, end))
        return end
