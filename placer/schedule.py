"""Schedules as data: in which order stages run micro-batches, how many they hold, and how long a step takes.

A step of 3 stages and 4 micro-batches; digits are forward passes, letters backward passes (a belongs to 0), each takes
one unit of time::

    fill-drain      stage 0   0 1 2 3 . . . . a b c d      all forward passes, then all backward passes (GPipe);
                    stage 1   . 0 1 2 3 . . a b c d .      every stage holds 4 micro-batches
                    stage 2   . . 0 1 2 3 a b c d . .

    1f1b            stage 0   0 1 2 . . a 3 b . c . d      stage p of S first runs S - 1 - p forward passes, then one
                    stage 1   . 0 1 . a 2 b 3 c . d .      forward and one backward in turn, then the backward passes
                    stage 2   . . 0 a 1 b 2 c 3 d . .      that are left; it holds S - p micro-batches

Both take (chunks + stages - 1) * (forward + backward) where stages are equal and transfers free.

Source: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from placer.errors import InputError
from placer.schema import Schedule

__all__ = ["Phase", "Task", "Timeline", "TimelineTask", "in_flight", "orders", "simulate"]

Phase = Literal["forward", "backward"]


class Task(NamedTuple):
    """One pass of one micro-batch through a stage."""

    phase: Phase
    micro_batch: int


class TimelineTask(NamedTuple):
    """A task with its stage and its times, in milliseconds from the start of the step."""

    stage: int
    phase: Phase
    micro_batch: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        step_ms: from the first start to the last end.
        tasks: by start, then stage.
        busy_ms: by stage, the time that it computes.
        in_flight: by stage, the most micro-batches that it holds at once: run forwards, not yet backwards.
    """

    step_ms: float
    tasks: tuple[TimelineTask, ...]
    busy_ms: tuple[float, ...]
    in_flight: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """The share of the stages' time that is idle, from 0 to 1."""
        there = self.step_ms * len(self.busy_ms)
        return 1.0 - sum(self.busy_ms) / there if there else 0.0


def in_flight(schedule: Schedule, stages: int, stage: int, chunks: int) -> int:
    """The most micro-batches that a stage holds at once in training.

    Args:
        schedule: the schedule.
        stages: how many stages there are.
        stage: counted from 0 in pipeline order.
        chunks: micro-batches in a batch.
    """
    return min(chunks, stages - stage) if schedule == "1f1b" else chunks


def orders(schedule: Schedule, stages: int, chunks: int, *, training: bool = True) -> list[list[Task]]:
    """The tasks of each stage, in the order in which it runs them.

    Args:
        schedule: the schedule.
        stages: how many stages there are, at least 1.
        chunks: micro-batches in a batch, at least 1.
        training: without it there are forward passes alone, in the order of micro-batches.

    Raises:
        InputError: no stages, or no micro-batches.
    """
    if stages < 1 or chunks < 1:
        raise InputError(f"a schedule needs a stage and a micro-batch; got stages={stages}, chunks={chunks}")
    if not training:
        return [_forwards(0, chunks) for _ in range(stages)]
    return [_order(in_flight(schedule, stages, stage, chunks), chunks) for stage in range(stages)]


def _order(held: int, chunks: int) -> list[Task]:
    """Fill up to so many micro-batches, then one backward pass for every forward pass, then drain."""
    order = _forwards(0, held)
    for micro_batch in range(chunks):
        order.append(Task("backward", micro_batch))
        order += _forwards(micro_batch + held, min(micro_batch + held + 1, chunks))
    return order


def _forwards(first: int, end: int) -> list[Task]:
    return [Task("forward", micro_batch) for micro_batch in range(first, end)]


def simulate(
    orders: Sequence[Sequence[Task]],
    forward_ms: Sequence[float],
    backward_ms: Sequence[float],
    transfer_ms: Sequence[float] | None = None,
    gradient_ms: Sequence[float] | None = None,
) -> Timeline:
    """The exact timeline of a step: every stage runs its tasks in order, each as soon as its input is there.

    A forward pass waits for the one of the stage before, a backward pass for that of the stage behind (the last stage's
    for its own forward pass). Transfers delay but keep no stage busy.

    Args:
        orders: the tasks of each stage, as ``orders`` gives them.
        forward_ms: by stage.
        backward_ms: by stage.
        transfer_ms: by stage but the last, of its output to the next; 0 if left out.
        gradient_ms: by stage but the last, of the gradient that it gets from the next; 0 if left out.

    Raises:
        InputError: the lengths differ, or tasks wait for each other for ever.
    """
    stages = len(orders)
    delays = (_delays(transfer_ms, stages, "transfer_ms"), _delays(gradient_ms, stages, "gradient_ms"))
    for name, times in (("forward_ms", forward_ms), ("backward_ms", backward_ms)):
        if len(times) != stages:
            raise InputError(f"{name} has {len(times)} entries for {stages} stages")
    end: dict[tuple[int, Phase, int], float] = {}
    tasks: list[TimelineTask] = []
    free, done = [0.0] * stages, [0] * stages
    while True:
        moved = False
        for stage in range(stages):
            while done[stage] < len(orders[stage]):
                phase, micro_batch = orders[stage][done[stage]]
                ready = _ready(stage, phase, micro_batch, stages, end, delays)
                if ready is None:
                    break
                start = max(free[stage], ready)
                free[stage] = start + (forward_ms if phase == "forward" else backward_ms)[stage]
                end[stage, phase, micro_batch] = free[stage]
                tasks.append(TimelineTask(stage, phase, micro_batch, start, free[stage]))
                done[stage] += 1
                moved = True
        if not moved:
            break
    _refuse_stuck(orders, done)
    return _timeline(tasks, stages)


def _ready(
    stage: int,
    phase: Phase,
    micro_batch: int,
    stages: int,
    end: dict[tuple[int, Phase, int], float],
    delays: tuple[Sequence[float], Sequence[float]],
) -> float | None:
    """When a task's input is there; None if that is not known yet."""
    if phase == "forward":
        if stage == 0:
            return 0.0
        before = end.get((stage - 1, "forward", micro_batch))
        return None if before is None else before + delays[0][stage - 1]
    own = end.get((stage, "forward", micro_batch))
    if own is None or stage == stages - 1:
        return own
    behind = end.get((stage + 1, "backward", micro_batch))
    return None if behind is None else max(own, behind + delays[1][stage])


def _delays(times: Sequence[float] | None, stages: int, name: str) -> Sequence[float]:
    if times is None:
        return [0.0] * (stages - 1)
    if len(times) != stages - 1:
        raise InputError(f"{name} has {len(times)} entries for {stages} stages; give one for each stage but the last")
    return times


def _refuse_stuck(orders: Sequence[Sequence[Task]], done: Sequence[int]) -> None:
    for stage, order in enumerate(orders):
        if done[stage] < len(order):
            task = order[done[stage]]
            raise InputError(
                f"stage {stage} waits for ever: the input of {task.phase} {task.micro_batch} is never made"
            )


def _timeline(tasks: list[TimelineTask], stages: int) -> Timeline:
    busy, held, most = [0.0] * stages, [0] * stages, [0] * stages
    for task in tasks:  # the tasks of each stage are in its order
        busy[task.stage] += task.end_ms - task.start_ms
        held[task.stage] += 1 if task.phase == "forward" else -1
        most[task.stage] = max(most[task.stage], held[task.stage])
    return Timeline(
        step_ms=max((task.end_ms for task in tasks), default=0.0),
        tasks=tuple(sorted(tasks, key=lambda task: (task.start_ms, task.stage))),
        busy_ms=tuple(busy),
        in_flight=tuple(most),
    )
