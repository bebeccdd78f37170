"""Rows of inference streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ..record import row
from . import cases
from .figures import (
    Row,
    at_full_size,
    best,
    by_devices,
    peers_of,
    peers_rows,
    ratio,
    rounded,
    spread_of,
    time_of,
)
from .sample import Sample

STREAMS = {("resnet101", 4): 3.3, ("gpt", 4): 3.8}


def streamed(name: str, samples: Sequence[Sample]) -> Iterator[Row]:
    """Yield the rows of a case by number of devices: Placer, all peers, and failures."""
    label = f"inference stream, {cases.training(name).label}"
    return by_devices(label, "a batch", samples, partial(_streamed, name))


def _streamed(name: str, case: str, samples: Sequence[Sample], count: int) -> Iterator[Row]:
    ours, peers, one_ms = (
        best(samples, "ours", count),
        peers_of(samples, count),
        time_of(best(samples, "eager", 1)),
    )
    speedups = {label: ratio(one_ms, time) for label, time in peers.items()}
    options: dict[str, Any] = {"smaller_is_better": False, "peers": speedups}
    if (name, count) in STREAMS:
        options["target"] = at_full_size(STREAMS[name, count])
    measure = "a batch in a stream, speed-up over eager PyTorch on one device"
    if ours is None:
        yield row(case, measure, "x", None, **options)
        return
    times = ours.values["step_ms"]
    if one_ms is not None:
        options["spread"] = spread_of(times, one_ms)
    yield row(case, measure, "x", ratio(one_ms, time_of(ours)), **options)
    shown = {label: rounded(time) for label, time in peers.items()}
    yield row(
        case,
        "a batch in a stream",
        "ms",
        rounded(time_of(ours)),
        spread=spread_of(times),
        peers=shown,
    )
    yield from peers_rows(case, "a batch in a stream", samples, count)
    yield row(case, "batches that it is cut into, where fastest", "", ours.chunks)
    yield row(
        case, "a batch, predicted from the profile", "ms", rounded(time_of(ours, "predicted_ms"))
    )
    difference = time_of(ours, "difference")
    yield row(
        case,
        "result, largest difference to the unsplit model, over the largest value",
        "",
        difference,
    )
    yield row(case, "stages that run without a CUDA graph", "", time_of(ours, "eager_stages"))
