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

TARGETS = {("resnet101", 4): 2.8, ("gpt", 4): 3.5, ("unet", 4): 2.8}
TWO_DEVICES = 1.85
OVER_PEERS = 1.3


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
    wanted = TWO_DEVICES if count == 2 else TARGETS.get((name, count))
    options: dict[str, Any] = {"smaller_is_better": False, "peers": speedups}
    if wanted is not None:
        options["target"] = at_full_size(wanted)
    if ours is None:
        yield row(case, SPEEDUP, "x", None, **options)
        return
    times, step_ms = ours.values["step_ms"], time_of(ours)
    assert step_ms is not None
    spread = spread_of(times, one_ms) if one_ms is not None else None
    yield row(case, SPEEDUP, "x", ratio(one_ms, step_ms), spread=spread, **options)
    if peers:
        quickest_ms, wanted = min(peers.values()), at_full_size(OVER_PEERS)
        options = {
            "spread": spread_of(times, quickest_ms),
            "target": wanted,
            "smaller_is_better": False,
        }
        yield row(
            case, "training step, over the best peer", "x", ratio(quickest_ms, step_ms), **options
        )
    shown = {label: rounded(time) for label, time in peers.items()}
    yield row(case, "training step", "ms", rounded(step_ms), spread=spread_of(times), peers=shown)
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
    predicted = rounded(time_of(ours, "predicted_ms"))
    yield row(case, "training step, as the placement predicts it", "ms", predicted)
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
