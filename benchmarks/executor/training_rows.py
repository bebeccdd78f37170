"""Rows of training steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ..record import row
from . import cases, distributed
from .figures import (
    SPEEDUP,
    Row,
    at_full_size,
    best,
    by_devices,
    memory_row,
    peers_of,
    peers_rows,
    ratio,
    rounded,
    row_of,
    spread_of,
    time_of,
)
from .sample import Sample

STEP_MS = {("resnet101", 4): 56.0, ("gpt", 4): 144.0, ("unet", 4): 115.0}
"""Milliseconds of a step to reach on four H100s."""
OVER_BEST_PEER = "training step, over the best peer"
OVER_PEERS = 0.99
"""Of the best peer's speed; what is missing is within the spread of turns."""
PREDICTED = 0.05
"""The relative error of a predicted step time."""


def training(name: str, samples: Sequence[Sample]) -> Iterator[Row]:
    """Yield the rows of a case by number of devices: Placer, all peers, and failures."""
    return by_devices(
        cases.training(name).label, "training step", samples, partial(_pipelined, name)
    )


def _pipelined(name: str, case: str, samples: Sequence[Sample], count: int) -> Iterator[Row]:
    ours, peers, one_ms = (
        best(samples, "ours", count),
        peers_of(samples, count),
        time_of(best(samples, "eager", 1)),
    )
    speedups = {label: ratio(one_ms, time) for label, time in peers.items()}
    options: dict[str, Any] = {"smaller_is_better": False, "peers": speedups}
    over: dict[str, Any] = {"target": at_full_size(OVER_PEERS), "smaller_is_better": False}
    if ours is None:
        yield row(case, SPEEDUP, "x", None, **options)
        yield row(case, OVER_BEST_PEER, "x", None, **over)
        return
    times, step_ms = ours.values["step_ms"], time_of(ours)
    assert step_ms is not None
    spread = spread_of(times, one_ms) if one_ms is not None else None
    yield row(case, SPEEDUP, "x", ratio(one_ms, step_ms), spread=spread, **options)
    if peers:
        quickest_ms = min(peers.values())
        spread = spread_of(times, quickest_ms)
        yield row(case, OVER_BEST_PEER, "x", ratio(quickest_ms, step_ms), spread=spread, **over)
    shown = {label: rounded(time) for label, time in peers.items()}
    yield row(
        case,
        "training step",
        "ms",
        rounded(step_ms),
        target=at_full_size(STEP_MS.get((name, count))),
        spread=spread_of(times),
        peers=shown,
    )
    yield from peers_rows(case, "training step", samples, count)
    yield from _details(case, ours, step_ms)
    yield from _by_processes(case, samples, count)


def _details(case: str, ours: Sample, step_ms: float) -> Iterator[Row]:
    """Yield details of our step."""
    values = ours.values
    yield row(case, "micro-batches of the fastest step", "", ours.chunks)
    if "pipelines" in values:
        yield row(case, "pipelines that share each micro-batch", "", time_of(ours, "pipelines"))
    yield row_of(
        case, "a training step alone, from idle devices to idle devices", values["alone_ms"]
    )
    predicted_ms = time_of(ours, "predicted_ms")
    yield row(case, "training step, as the placement predicts it", "ms", rounded(predicted_ms))
    if predicted_ms is not None:
        error = abs(predicted_ms / step_ms - 1)
        wanted = at_full_size(PREDICTED)
        yield row(case, "relative error of that prediction", "", rounded(error), target=wanted)
    host = values["host_ms"]
    yield row_of(
        case, "host issues a step; at most a quarter of it is wanted", host, rounded(step_ms / 4)
    )
    yield from memory_row(case, ours)
    yield row(
        case,
        "loss, largest difference to the unsplit model",
        "",
        rounded(time_of(ours, "loss_difference")),
    )
    if not cases.is_small():
        yield row(case, "stages that run without a CUDA graph", "", time_of(ours, "eager_stages"))


def _by_processes(case: str, samples: Sequence[Sample], count: int) -> Iterator[Row]:
    """Yield the step time of ``placer.distributed`` where it ran."""
    found = best(samples, distributed.PLACED, count)
    if found is not None:
        times = found.values["step_ms"]
        yield row_of(case, "training step by placer.distributed, a process for each device", times)
