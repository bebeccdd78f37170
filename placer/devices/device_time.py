"""Device time: how long work keeps a GPU busy, whatever it takes the host to issue it."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch

from placer.devices.names import synchronise
from placer.devices.recording import record

_CYCLES_PER_MS = 2e6  # about the clock of current GPUs
# Rounds that are issued before the first of them is over.
_AHEAD = 3


def queued_ms(
    passes: Sequence[Callable[[], Any]],
    device: torch.device,
    repeats: int,
    before: Sequence[Callable[[], Any]] = (),
) -> list[list[float]]:
    """Device time of each pass, by events in a queue that is full before the device begins.

    Args:
        passes: run in this order, ``repeats`` times over.
        device: a CUDA device.
        repeats: how often.
        before: for each pass, work that runs before it each time and is not timed; none if empty.

    Returns:
        For each pass its ``repeats`` times in milliseconds.
    """
    before = before or [_nothing] * len(passes)
    work = list(zip(before, passes, strict=True))
    with torch.cuda.device(device):
        synchronise(device)
        began = time.perf_counter()
        for prepare, run in work:
            prepare()
            run()
        launch_s = time.perf_counter() - began
        synchronise(device)
        marks = [[(_timing_event(), _timing_event()) for _ in passes] for _ in range(repeats)]
        pause(device, 1e3 * min(0.2, 1.5 * repeats * launch_s + 1e-4))
        for row in marks:
            for (prepare, run), (began_mark, ended_mark) in zip(work, row, strict=True):
                prepare()
                began_mark.record()
                run()
                ended_mark.record()
        synchronise(device)
        return [
            [float(row[i][0].elapsed_time(row[i][1])) for row in marks] for i in range(len(passes))
        ]


def lasting_ms(
    passes: Sequence[Callable[[], Any]], device: torch.device, seconds: float
) -> list[list[float]]:
    """Device time of each pass when they run one after another for so long, without a rest.

    Args:
        passes: recorded ones: what the host takes longer to issue than the device to run counts,
            too.
        device: a CUDA device.
        seconds: how long, at least; each runs at least once.

    Returns:
        For each pass its times in milliseconds, in order.
    """
    rounds: list[list[float]] = []
    waiting: deque[list[torch.cuda.Event]] = deque()
    with torch.cuda.device(device):
        synchronise(device)
        began = time.perf_counter()
        while not waiting or time.perf_counter() - began < seconds:
            marks = [_timing_event() for _ in range(len(passes) + 1)]
            marks[0].record()
            for run, mark in zip(passes, marks[1:], strict=True):
                run()
                mark.record()
            waiting.append(marks)
            if len(waiting) > _AHEAD:
                waiting[0][-1].synchronize()
                rounds.append(_between(waiting.popleft()))
        synchronise(device)
        rounds += map(_between, waiting)
    return [list(times) for times in zip(*rounds, strict=True)]


def _between(marks: Sequence[torch.cuda.Event]) -> list[float]:
    return [float(first.elapsed_time(second)) for first, second in pairwise(marks)]


def pause(device: torch.device, lasting_ms: float) -> None:
    """Let the current queue of a CUDA device wait for about so long."""
    with torch.cuda.device(device):
        torch.cuda._sleep(int(_CYCLES_PER_MS * lasting_ms))  # type: ignore[no-untyped-call]


def _nothing() -> None:
    return


@cache
def replay_ms(device: torch.device) -> float:
    """The time that the replay of a graph takes beyond its kernels, in milliseconds; 0 but on CUDA.

    Inside a larger graph, a layer's kernels follow those of the layer before without it. It is what
    a line through the times of graphs of one and of eleven equal kernels leaves for none.
    """
    if device.type != "cuda":
        return 0.0
    number = torch.zeros(1, device=device)

    def kernels(count: int) -> None:
        for _ in range(count):
            number.add_(1)

    replays = [record([partial(kernels, count)], device)[0] for count in (1, 11)]
    one, eleven = (statistics.median(times) for times in queued_ms(replays, device, 50))
    return max(0.0, one - (eleven - one) / 10)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
