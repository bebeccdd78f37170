"""Rows of inference streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..record import row
from . import cases
from .figures import PEERS, Row, at_full_size, best, failures, ratio, rounded, spread_of, time_of
from .sample import Sample

STREAMS = {("resnet101", 4): 3.3, ("gpt", 4): 3.8}


def streamed(name: str, samples: Sequence[Sample]) -> Iterator[Row]:
    """Of one case: eager PyTorch, ours at each number of devices, and who has no value."""
    if not samples:
        return
    label = f"inference stream, {cases.training(name).label}"
    one = best(samples, "eager", 1)
    if one is not None:
        spread = spread_of(one.values["step_ms"])
        yield row(f"{label}, 1 device", "a batch, eager PyTorch", "ms", rounded(time_of(one)), spread=spread)
    for count in cases.asked():
        yield from _streamed(f"{label}, {count} devices", name, samples, one, count)
    yield from failures(label, samples)


def _streamed(case: str, name: str, samples: Sequence[Sample], one: Sample | None, count: int) -> Iterator[Row]:
    ours, one_ms = best(samples, "ours", count), time_of(one)
    peers = {label: best(samples, engine, count) for engine, label in PEERS.items()}
    options: dict[str, Any] = {
        "smaller_is_better": False,
        "peers": {label: ratio(one_ms, time_of(sample)) for label, sample in peers.items() if sample is not None},
    }
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
    shown = {label: rounded(time_of(sample)) for label, sample in peers.items() if sample is not None}
    yield row(case, "a batch in a stream", "ms", rounded(time_of(ours)), spread=spread_of(times), peers=shown)
    yield row(case, "batches that it is cut into, where fastest", "", ours.chunks)
    yield row(case, "a batch, predicted from the profile", "ms", rounded(time_of(ours, "predicted_ms")))
    difference = time_of(ours, "difference")
    yield row(case, "result, largest difference to the unsplit model, over the largest value", "", difference)
    yield row(case, "stages that run without a CUDA graph", "", time_of(ours, "eager_stages"))
