"""Figures of rows made of samples: medians, ratios and spreads, rounded to four digits.

Targets count only at full size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from ..record import row
from . import cases, distributed, gpipe, replicas, stream, tutorial
from .sample import Sample

Row = dict[str, Any]
PEERS = {
    replicas.DDP: "DDP",
    replicas.DDP_COMPILED: "DDP, torch.compile",
    replicas.FSDP2: "FSDP2",
    distributed.ENGINE: "torch.distributed 1F1B",
    distributed.INTERLEAVED: "torch.distributed interleaved",
    distributed.ZERO_BUBBLE: "torch.distributed zero-bubble",
    tutorial.ENGINE: "tutorial's split",
    gpipe.ENGINE: "torchgpipe",
    stream.DISPATCH: "accelerate's dispatch_model",
}
MEMORY_PERCENT = 5.0
SPEEDUP = "training step, speed-up over eager PyTorch on one device"


def of_case(samples: Sequence[Sample], case: str) -> list[Sample]:
    """Return the samples of a case."""
    return [sample for sample in samples if sample.case == case]


def at_full_size(value: float | None) -> float | None:
    """Return a target, or None at tiny sizes."""
    return None if cases.is_small() else value


def time_of(sample: Sample | None, measure: str = "step_ms") -> float | None:
    """Return the median of a measure."""
    return (
        median(sample.values[measure])
        if sample is not None and sample.values.get(measure)
        else None
    )


def best(samples: Sequence[Sample], engine: str, devices: int) -> Sample | None:
    """Return the sample with the shortest step."""
    found = [
        s
        for s in samples
        if s.engine == engine and s.devices == devices and s.values.get("step_ms")
    ]
    return min(found, key=lambda sample: median(sample.values["step_ms"]), default=None)


def rounded(value: float | None) -> float | None:
    """Return a value rounded to four digits."""
    return None if value is None else float(f"{value:.4g}")


def ratio(above: float | None, below: float | None) -> float | None:
    """Return the ratio of two values, to four digits."""
    return None if above is None or below is None else rounded(above / below)


def spread_of(values: Sequence[float], over: float | None = None) -> tuple[float, float]:
    """Return the smallest and the largest value, or of ``over`` divided by the values if given."""
    numbers = sorted(values if over is None else [over / value for value in values])
    return float(f"{numbers[0]:.4g}"), float(f"{numbers[-1]:.4g}")


def peers_of(samples: Sequence[Sample], devices: int) -> dict[str, float]:
    """Return the step time of every peer that has a time, by its label."""
    found = {label: time_of(best(samples, engine, devices)) for engine, label in PEERS.items()}
    return {label: time for label, time in found.items() if time is not None}


def by_devices(
    label: str,
    measure: str,
    samples: Sequence[Sample],
    several: Callable[[str, Sequence[Sample], int], Iterator[Row]],
) -> Iterator[Row]:
    """Yield a case's rows by number of devices, each number from one contest.

    The rows are eager PyTorch on one device, ours and the peers', and the engines without a value.

    Args:
        label: the label of the case.
        measure: the measure of eager PyTorch's time.
        samples: the samples of the case.
        several: makes the rows of a contest from its case, its samples and its number of devices.
    """
    for count in sorted({sample.beside for sample in samples if sample.beside}, reverse=True):
        mine = [sample for sample in samples if sample.beside == count]
        case = f"{label}, {count} devices"
        yield from several(case, mine, count)
        one = best(mine, "eager", 1)
        if one is not None:
            alone = (
                ", after the others: memory does not hold both"
                if one.values.get("alternating") == [0.0]
                else ""
            )
            yield row_of(
                case, f"{measure}, eager PyTorch on one device{alone}", one.values["step_ms"]
            )
        yield from turns_row(case, mine)
        yield from failures(case, mine)


def peers_rows(case: str, measure: str, samples: Sequence[Sample], devices: int) -> Iterator[Row]:
    """Yield the time of every peer with its spread."""
    for engine, label in PEERS.items():
        found = best(samples, engine, devices)
        if found is not None:
            yield row_of(case, f"{measure}, {label}", found.values["step_ms"])


def turns_row(case: str, samples: Sequence[Sample]) -> Iterator[Row]:
    """Yield the number of turns of each engine; the value is the smallest."""
    turns = [len(sample.values["step_ms"]) for sample in samples if sample.values.get("step_ms")]
    if turns:
        yield row(case, "turns of each engine", "", min(turns))


def failures(case: str, samples: Sequence[Sample]) -> Iterator[Row]:
    """Yield a row for each engine without a value, with the reason."""
    for sample in samples:
        if sample.failed:
            where = f"{sample.chunks} micro-batches: " if sample.chunks > 1 else ""
            yield row(
                case,
                f"no value of {PEERS.get(sample.engine, sample.engine)}: {where}{sample.failed}",
                "",
                None,
            )


def row_of(case: str, measure: str, times: Sequence[float], target: float | None = None) -> Row:
    """Return a row of times in ms."""
    return row(
        case,
        measure,
        "ms",
        rounded(median(times)),
        spread=spread_of(times),
        target=at_full_size(target),
    )


def memory_row(case: str, sample: Sample) -> Iterator[Row]:
    """Yield the error of the predicted memory, where GPUs were measured."""
    peaks, predicted = sample.values.get("peak_bytes"), sample.values.get("predicted_bytes")
    if not peaks or not predicted:
        return
    off = [100 * abs(guess / peak - 1) for peak, guess in zip(peaks, predicted, strict=True)]
    measure = "memory of a device in a step, prediction against use, the farthest off"
    yield row(
        case,
        measure,
        "%",
        rounded(max(off)),
        spread=spread_of(off),
        target=at_full_size(MEMORY_PERCENT),
    )
