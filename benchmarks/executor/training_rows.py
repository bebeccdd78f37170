"""Rows of training steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..record import row
from . import cases, distributed
from .figures import (
    PEERS,
    SPEEDUP,
    Row,
    at_full_size,
    best,
    failures,
    memory_row,
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
    """Of one case: eager PyTorch, ours at each number of devices, and who has no value."""
    if not samples:
        return
    label = cases.training(name).label
    eager = best(samples, "eager", 1)
    if eager is not None:
        spread = spread_of(eager.values["step_ms"])
        yield row(f"{label}, 1 device", "training step, eager PyTorch", "ms", rounded(time_of(eager)), spread=spread)
    for count in cases.asked():
        yield from _pipelined(f"{label}, {count} devices", name, samples, eager, count)
    yield from failures(label, samples)


def _pipelined(case: str, name: str, samples: Sequence[Sample], eager: Sample | None, count: int) -> Iterator[Row]:
    ours, one_ms = best(samples, "ours", count), time_of(eager)
    peers = {label: best(samples, engine, count) for engine, label in PEERS.items()}
    ratios = {label: ratio(one_ms, time_of(sample)) for label, sample in peers.items() if sample is not None}
    wanted = TWO_DEVICES if count == 2 else TARGETS.get((name, count))
    options: dict[str, Any] = {"smaller_is_better": False, "peers": ratios}
    if wanted is not None:
        options["target"] = at_full_size(wanted)
    if ours is None:
        yield row(case, SPEEDUP, "x", None, **options)
        return
    times, step_ms = ours.values["step_ms"], time_of(ours)
    assert step_ms is not None
    spread = spread_of(times, one_ms) if one_ms is not None else None
    yield row(case, SPEEDUP, "x", ratio(one_ms, step_ms), spread=spread, **options)
    others = [time for sample in peers.values() if (time := time_of(sample)) is not None]
    if others:
        value, wanted = ratio(min(others), step_ms), at_full_size(OVER_PEERS)
        options = {"spread": spread_of(times, min(others)), "target": wanted, "smaller_is_better": False}
        yield row(case, "training step, over the best peer", "x", value, **options)
    shown = {label: rounded(time_of(sample)) for label, sample in peers.items() if sample is not None}
    yield row(case, "training step", "ms", rounded(step_ms), spread=spread_of(times), peers=shown)
    yield from _details(case, ours, step_ms)
    yield from _by_processes(case, samples, count)


def _details(case: str, ours: Sample, step_ms: float) -> Iterator[Row]:
    """What stands behind our step."""
    values = ours.values
    yield row(case, "micro-batches of the fastest step", "", ours.chunks)
    yield row_of(case, "a training step alone, from idle devices to idle devices", values["alone_ms"])
    predicted = rounded(time_of(ours, "predicted_ms"))
    yield row(case, "such a step as the placement predicts it, optimizer included", "ms", predicted)
    host = values["host_ms"]
    yield row_of(case, "host issues a step; at most a quarter of it is wanted", host, rounded(step_ms / 4))
    yield from memory_row(case, ours)
    yield row(case, "loss, largest difference to the unsplit model", "", rounded(time_of(ours, "loss_difference")))
    if not cases.is_small():
        yield row(case, "stages that run without a CUDA graph", "", time_of(ours, "eager_stages"))


def _by_processes(case: str, samples: Sequence[Sample], count: int) -> Iterator[Row]:
    """The step of ``placer.distributed``, where it was run."""
    found = best(samples, distributed.PLACED, count)
    if found is not None:
        times = found.values["step_ms"]
        yield row_of(case, "training step by placer.distributed, a process for each device", times)
