"""The zero-bubble schedule: a backward pass in two halves, the second of which fills the bubbles.

3 stages, 4 micro-batches; digits are forward passes, letters the input halves of backward passes, capitals their weight
halves, each takes one unit of time::

    stage 0   0 1 2 3 . a A b B c C d D .
    stage 1   . 0 1 2 a 3 b A c B d C D .
    stage 2   . . 0 a 1 b 2 c 3 d A B C D

Every stage takes, whenever it is free: the input half that is ready (a stage waits for it), else the forward pass
that is ready, else a weight half (nobody waits for it). So unlike stages are balanced as well as they can be without
foresight.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024; the greedy rule here in place of their fixed orders.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal, NamedTuple

from placer.errors import InputError

Half = Literal["forward", "backward", "weights"]


class Task(NamedTuple):
    """One pass of one micro-batch through one stage, with the time at which it would start, in milliseconds."""

    start_ms: float
    end_ms: float
    stage: int
    phase: Half
    micro_batch: int


def zero_bubble(
    forward_ms: Sequence[float],
    backward_ms: Sequence[float],
    weights_ms: Sequence[float],
    chunks: int,
    held: Sequence[int],
    transfer_ms: float = 0.0,
) -> list[Task]:
    """The passes of a step in the order in which they start.

    Args:
        forward_ms: by stage.
        backward_ms: by stage, the input half.
        weights_ms: by stage, the weight half.
        chunks: micro-batches in a batch, at least 1.
        held: by stage, the most micro-batches that it may have begun and not yet finished, at least 1.
        transfer_ms: of a value or a gradient between stages.

    Raises:
        InputError: the lengths differ, or a count is below 1.
    """
    stages = len(forward_ms)
    if not stages == len(backward_ms) == len(weights_ms) == len(held):
        raise InputError(
            f"zero_bubble needs one entry a stage; got {stages}, {len(backward_ms)}, {len(weights_ms)} and {len(held)}"
        )
    if not stages or chunks < 1 or min(held) < 1:
        raise InputError(f"zero_bubble needs a stage, a micro-batch and room for one; got {stages}, {chunks}, {held}")
    times = {"forward": forward_ms, "backward": backward_ms, "weights": weights_ms}
    done = [{"forward": 0, "backward": 0, "weights": 0} for _ in range(stages)]
    arrived: list[dict[str, list[float]]] = [{"forward": [], "backward": []} for _ in range(stages)]
    arrived[0]["forward"] = [0.0] * chunks
    tasks: list[Task] = []
    free = [0.0] * stages
    wake = [(0.0, stage) for stage in range(stages)]
    while wake:
        now, stage = heapq.heappop(wake)
        if now < free[stage]:
            continue
        phase = _next(done[stage], arrived[stage], now, chunks, held[stage])
        if phase is None:
            continue
        micro_batch = done[stage][phase]
        end = now + times[phase][stage]
        tasks.append(Task(now, end, stage, phase, micro_batch))
        done[stage][phase] += 1
        free[stage] = end
        heapq.heappush(wake, (end, stage))
        goal, kind = _reader(stage, phase, stages)
        if goal is not None:
            there = end if goal == stage else end + transfer_ms
            arrived[goal][kind].append(there)
            heapq.heappush(wake, (there, goal))
    return sorted(tasks, key=lambda task: (task.start_ms, task.end_ms))


def _next(done: dict[str, int], arrived: dict[str, list[float]], now: float, chunks: int, held: int) -> Half | None:
    """What a free stage does now."""
    if _is_there(arrived["backward"], done["backward"], now):
        return "backward"
    if done["forward"] - done["weights"] < held and _is_there(arrived["forward"], done["forward"], now):
        return "forward"
    if done["weights"] < done["backward"]:
        return "weights"
    return None


def _is_there(arrivals: list[float], index: int, now: float) -> bool:
    return index < len(arrivals) and arrivals[index] <= now


def _reader(stage: int, phase: Half, stages: int) -> tuple[int | None, str]:
    """The stage that a pass makes ready for another one."""
    if phase == "forward":
        return (stage + 1, "forward") if stage + 1 < stages else (stage, "backward")
    if phase == "backward" and stage > 0:
        return stage - 1, "backward"
    return None, ""
