"""Device time: how long work keeps a GPU busy, without the host's launch overhead."""

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

_CYCLES_PER_MS = 2e6  # about the clock rate of current GPUs
# Rounds in flight: the queue never runs empty, and the host never runs far ahead.
_AHEAD = 3


def queued_ms(
    passes: Sequence[Callable[[], Any]],
    device: torch.device,
    repeats: int,
    before: Sequence[Callable[[], Any]] = (),
) -> list[list[float]]:
    """Return the device time of each pass, measured by events in a queue that fills first.

        host    pause | launch launch launch ...
        device  ───── pause ─────|mark pass mark|mark pass mark| ...

    The device starts only when its queue is full, so launch overhead does not show.

    Args:
        passes: run in this order, ``repeats`` times over.
        device: a CUDA device.
        repeats: number of rounds.
        before: for each pass, untimed work that precedes it in every round; empty for none.

    Returns:
        For each pass, its ``repeats`` times in milliseconds.
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
        # long enough for the host to launch all rounds, at most 0.2 s
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
    """Return the device times of passes that run back to back for ``seconds``.

    Args:
        passes: recorded passes; if the host launches one slower than the device runs it, the launch
            time shows.
        device: a CUDA device.
        seconds: minimum duration; each pass runs at least once.

    Returns:
        For each pass, its times in milliseconds, in order.
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
    """Make the current stream of a CUDA device wait for about ``lasting_ms``."""
    with torch.cuda.device(device):
        torch.cuda._sleep(int(_CYCLES_PER_MS * lasting_ms))  # type: ignore[no-untyped-call]


def _nothing() -> None:
    return


@cache
def replay_ms(device: torch.device) -> float:
    """Return the launch time of a CUDA graph in ms, beyond its kernels; 0 on other devices.

    Inside a larger graph, a layer's kernels follow the previous layer's without this time. It is
    the intercept of a line through the times of graphs with 1 and with 11 equal kernels.
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
