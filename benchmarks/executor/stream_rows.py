"""Rows of inference streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ..record import row
from . import cases, stream
from .figures import (
    Row,
    at_full_size,
    best,
    by_devices,
    failures,
    gain,
    peers_of,
    ratio,
    rounded,
    row_of,
    spread_of,
    time_of,
)
from .sample import Sample

SPEEDUP = "a batch in a stream, speed-up over eager PyTorch on one device"
STREAMS = {("resnet101", 4): 3.3, ("gpt", 4): 3.8}


def streamed(name: str, samples: Sequence[Sample]) -> Iterator[Row]:
    """Of one case: eager PyTorch, ours at each number of devices, and who has no value."""
    label = f"inference stream, {cases.training(name).label}"
    return by_devices(label, "a batch", samples, partial(_streamed, name, samples))


def _streamed(name: str, samples: Sequence[Sample], case: str, one_ms: float | None, count: int) -> Iterator[Row]:
    ours, peers = best(samples, "ours", count), peers_of(samples, count)
    speedups = {label: ratio(one_ms, time) for label, time in peers.items()}
    options: dict[str, Any] = {"smaller_is_better": False, "peers": speedups}
    if (name, count) in STREAMS:
        options["target"] = at_full_size(STREAMS[name, count])
    measure = SPEEDUP
    if ours is None:
        yield row(case, measure, "x", None, **options)
        return
    times = ours.values["step_ms"]
    if one_ms is not None:
        options["spread"] = spread_of(times, one_ms)
    yield row(case, measure, "x", ratio(one_ms, time_of(ours)), **options)
    shown = {label: rounded(time) for label, time in peers.items()}
    yield row(case, "a batch in a stream", "ms", rounded(time_of(ours)), spread=spread_of(times), peers=shown)
    yield row(case, "batches that it is cut into, where fastest", "", ours.chunks)
    yield row(case, "a batch, predicted from the profile", "ms", rounded(time_of(ours, "predicted_ms")))
    difference = time_of(ours, "difference")
    yield row(case, "result, largest difference to the unsplit model, over the largest value", "", difference)
    yield row(case, "stages that run without a CUDA graph", "", time_of(ours, "eager_stages"))


def compiled_label(name: str) -> str:
    """How rows name a case under the compiler."""
    return f"compile=True, inference stream, {cases.training(name).label}"


def compiled(name: str, samples: Sequence[Sample], count: int) -> Iterator[Row]:
    """What the compiler gains in a stream, and how many segments it was kept for."""
    case = f"{compiled_label(name)}, {count} devices"
    plain, made = (best(samples, engine, count) for engine in ("ours", "compiled"))
    one, alone = (time_of(best(samples, engine, 1)) for engine in ("eager", stream.ALONE))
    if plain is not None and made is not None:
        kept = time_of(made, "compiled_segments")
        if kept:
            yield from gain(case, "a batch in a stream with compile=True, speed-up", made, time_of(plain))
            peers = {} if alone is None else {f"{stream.ALONE} on one device": ratio(one, alone)}
            yield from gain(case, SPEEDUP, made, one, peers=peers)
        yield row_of(case, "a batch in a stream without compile", plain.values["step_ms"])
        yield row(case, f"of {count} segments, compiled ones that were faster and so kept", "", kept)
        yield row(case, "result, largest difference to the unsplit model", "", time_of(made, "difference"))
    yield from failures(case, samples)
