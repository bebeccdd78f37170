"""All rows: speed-ups over one GPU together with the peers', and failures with their reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from ..record import row
from . import (
    cases,
    compiling,
    large,
    overhead,
    replicas,
    sharded,
    stream,
    stream_rows,
    switching,
    training_rows,
    tutorial_resnet50,
)
from .figures import (
    PEERS,
    SPEEDUP,
    Row,
    at_full_size,
    best,
    by_devices,
    failures,
    memory_row,
    of_case,
    peers_of,
    peers_rows,
    ratio,
    rounded,
    row_of,
    spread_of,
    time_of,
    turns_row,
)
from .sample import Sample
from .training_rows import PREDICTED

OVERHEAD = 1.02
GRAPH = "the model alone, as a CUDA graph"


def rows(samples: Sequence[Sample]) -> list[Row]:
    """Return all rows of these samples; targets count only at full size."""
    made: list[Row] = []
    for name in cases.FULL:
        made += training_rows.training(name, of_case(samples, name))
    for name in stream.NAMES:
        made += stream_rows.streamed(name, of_case(samples, stream.PREFIX + name))
    for name in sharded.NAMES:
        made += _sharded(name, of_case(samples, sharded.PREFIX + name))
    made += _switching(of_case(samples, switching.CASE))
    made += _overhead(of_case(samples, overhead.CASE))
    made += _large(of_case(samples, large.CASE))
    for name in compiling.NAMES:
        target = compiling.SPEEDUPS.get(name, 1.85)
        made += _compiled(
            _compiled_label(name),
            "training step",
            of_case(samples, compiling.PREFIX + name),
            target,
        )
    for name in stream.NAMES:
        found = of_case(samples, stream.COMPILED + name)
        made += _compiled(_compiled_stream_label(name), "a batch in a stream", found)
    made += _tutorial(of_case(samples, tutorial_resnet50.CASE))
    return made


def _compiled_label(name: str) -> str:
    return f"compile=True, {compiling.training(name).label}"


def _compiled_stream_label(name: str) -> str:
    return f"compile=True, inference stream, {cases.training(name).label}"


def belongs(case: str, contest: str) -> bool:
    """Return whether a row's case belongs to a contest.

    A contest is ``CASE@DEVICES``, or ``CASE`` where only one number of devices is possible.
    """
    name, _, devices = contest.partition("@")
    # In older results, eager PyTorch's rows have a case of their own.
    if devices and not case.endswith((f", {devices} devices", ", 1 device")):
        return False
    if name.startswith(stream.COMPILED):
        return case.startswith(_compiled_stream_label(name.removeprefix(stream.COMPILED)))
    if name.startswith(compiling.PREFIX):
        return case.startswith(_compiled_label(name.removeprefix(compiling.PREFIX)))
    if name.startswith(sharded.PREFIX):
        return case.startswith(_sharded_label(name.removeprefix(sharded.PREFIX)))
    if name.startswith(stream.PREFIX):
        return case.startswith(
            f"inference stream, {cases.training(name.removeprefix(stream.PREFIX)).label}"
        )
    return case.startswith(cases.training(name).label if name in cases.FULL else name)


def _switching(samples: Sequence[Sample]) -> Iterator[Row]:
    for sample in samples:
        where = f"{sample.devices} devices"
        if sample.engine == "clones" and not sample.failed:
            case = f"{switching.CASE}, 100-layer model, enable_clone, {where}"
            measure = "update_flow, and the first call's extra"
            yield row_of(case, measure, sample.values["switch_ms"], 1.0)
            yield row_of(case, "update_flow alone", sample.values["update_flow_ms"])
        elif sample.engine == "moves" and not sample.failed:
            case = f"{switching.CASE}, {sample.values['gigabytes'][0]:.2g} GB model, {where}"
            yield row_of(case, "update_flow, every layer moves", sample.values["move_ms"], 1000.0)
    yield from failures(switching.CASE, samples)


def _overhead(samples: Sequence[Sample]) -> Iterator[Row]:
    model = (
        "tiny ResNet-18, 1 device"
        if cases.is_small()
        else "ResNet-50, 224 px, batch 32, TF32, 1 GPU"
    )
    case = f"{overhead.CASE}, {model}"
    times = {sample.engine: sample.values["step_ms"] for sample in samples if not sample.failed}
    yield from _against(
        case, "training step by train_step", "CUDA graph", times.get("ours"), times.get("graph")
    )
    yield from _against(
        case,
        "training step by train_step",
        "CUDA graph, the optimizer behind it",
        times.get("ours"),
        times.get("graph passes"),
    )
    yield from _against(
        case,
        "a batch in a stream",
        "CUDA graph",
        times.get("ours stream"),
        times.get("graph forward"),
    )
    for measure, suffix in (
        ("forward by flow(x)", " forward"),
        ("training step by train_step", ""),
    ):
        graph, eager = times.get(f"graph{suffix}"), times.get(f"eager{suffix}")
        peers = (
            {} if graph is None or eager is None else {GRAPH: ratio(median(graph), median(eager))}
        )
        yield from _against(case, measure, "eager model", times.get(f"ours{suffix}"), eager, peers)
    yield from failures(case, samples)


def _against(
    case: str,
    measure: str,
    what: str,
    ours: Sequence[float] | None,
    alone: Sequence[float] | None,
    peers: Mapping[str, float | None] | None = None,
) -> Iterator[Row]:
    """Yield the ratio of our time to the time of the model alone, where both are known."""
    if ours is None or alone is None:
        return
    over = [time / median(alone) for time in ours]
    name = f"{measure}, over the model alone, {what}"
    target = at_full_size(OVERHEAD)
    yield row(
        case, name, "x", rounded(median(over)), spread=spread_of(over), target=target, peers=peers
    )


LARGE_OVER_PEERS = 1.15
"""Of FSDP2's speed, to reach for the model that no device holds."""


def _large(samples: Sequence[Sample]) -> Iterator[Row]:
    """Yield rows of the model too large for one device, with FSDP2 and the fullest device."""
    for count in sorted({sample.beside for sample in samples}, reverse=True):
        mine = [sample for sample in samples if sample.beside == count]
        case = f"{large.CASE}, {large.label()}, {count} devices"
        ours, peers = best(mine, "ours", count), peers_of(mine, count)
        if ours is not None:
            yield from _large_ours(case, ours, peers)
        yield from peers_rows(case, "training step", mine, count)
        yield from turns_row(case, [sample for sample in mine if sample.engine != "eager"])
        yield from failures(case, mine)


def _large_ours(case: str, ours: Sample, peers: Mapping[str, float]) -> Iterator[Row]:
    values, step_ms = ours.values, time_of(ours)
    spread = spread_of(values["step_ms"])
    shown = {label: rounded(time) for label, time in peers.items()}
    yield row(case, "training step", "ms", rounded(step_ms), spread=spread, peers=shown)
    if peers:
        quickest_ms = min(peers.values())
        options: dict[str, Any] = {
            "target": at_full_size(LARGE_OVER_PEERS),
            "smaller_is_better": False,
        }
        options["spread"] = spread_of(values["step_ms"], quickest_ms)
        yield row(
            case, "training step, over the best peer", "x", ratio(quickest_ms, step_ms), **options
        )
    yield row(case, "micro-batches", "", ours.chunks)
    yield row_of(
        case, "a training step alone, from idle devices to idle devices", values["alone_ms"]
    )
    yield row(
        case,
        "training step, as the placement predicts it",
        "ms",
        rounded(time_of(ours, "predicted_ms")),
    )
    host = values["host_ms"]
    yield row_of(
        case,
        "host issues a step; at most a quarter of it is wanted",
        host,
        rounded((step_ms or 0.0) / 4),
    )
    losses = values["loss"]
    measure = f"loss after {len(losses) - 1} steps on one batch, over the first"
    yield row(case, measure, "x", ratio(losses[-1], losses[0]), target=at_full_size(1.0))
    if values.get("peak_bytes"):
        yield row(
            case, "memory of the fullest device", "GiB", rounded(max(values["peak_bytes"]) / 2**30)
        )
    yield from memory_row(case, ours)


def _sharded_label(name: str) -> str:
    return f"FSDP2, {cases.training(name).label}"


def _sharded(name: str, samples: Sequence[Sample]) -> Iterator[Row]:
    """Yield rows by number of devices: FSDP2's step, and the error of its prediction."""
    return by_devices(_sharded_label(name), "training step", samples, _sharded_step)


def _sharded_step(case: str, samples: Sequence[Sample], count: int) -> Iterator[Row]:
    found = best(samples, replicas.FSDP2, count)
    if found is None:
        return
    step_ms, predicted_ms = time_of(found), time_of(found, "predicted_ms")
    assert step_ms is not None
    yield row_of(case, "training step", found.values["step_ms"])
    yield row(case, "training step, as predicted", "ms", rounded(predicted_ms))
    if predicted_ms is not None:
        error, wanted = abs(predicted_ms / step_ms - 1), at_full_size(PREDICTED)
        yield row(case, "relative error of that prediction", "", rounded(error), target=wanted)


def _compiled(
    case: str, what: str, samples: Sequence[Sample], target: float | None = None
) -> Iterator[Row]:
    """Yield the compiler's gain, and the number of segments that use the compiled version.

    Args:
        case: the case as its rows name it.
        what: the name of what is timed.
        samples: the samples of the case.
        target: the target for the speed-up over one device.
    """
    count = compiling.DEVICES
    case, speedup = f"{case}, {count} devices", f"{what}, speed-up over eager PyTorch on one device"
    plain, compiled, refined = (
        best(samples, engine, count) for engine in ("ours", "compiled", compiling.REFINED)
    )
    one, alone = (time_of(best(samples, engine, 1)) for engine in ("eager", stream.ALONE))
    if plain is not None and compiled is not None:
        kept = time_of(compiled, "compiled_segments")
        if kept:
            yield from _gain(case, f"{what} with compile=True, speed-up", compiled, time_of(plain))
            peers = {} if alone is None else {f"{stream.ALONE} on one device": ratio(one, alone)}
            yield from _gain(case, speedup, compiled, one, target, peers)
        yield from _gain(case, f"{speedup}, the placement refined under compile", refined, one)
        yield row_of(case, f"{what} without compile", plain.values["step_ms"])
        yield row(
            case, f"of {count} segments, compiled ones that were faster and so kept", "", kept
        )
        if compiled.values.get("difference"):
            measure = "result, largest difference to the unsplit model, over the largest value"
            yield row(case, measure, "", time_of(compiled, "difference"))
    yield from failures(case, samples)


def _gain(
    case: str,
    measure: str,
    sample: Sample | None,
    before: float | None,
    target: float | None = None,
    peers: Mapping[str, float | None] | None = None,
) -> Iterator[Row]:
    """Yield the speed-up over ``before``, where both times are known."""
    if sample is None or before is None:
        return
    times = sample.values["step_ms"]
    options: dict[str, Any] = {
        "target": at_full_size(target),
        "smaller_is_better": False,
        "peers": peers,
    }
    yield row(
        case, measure, "x", ratio(before, median(times)), spread=spread_of(times, before), **options
    )


def _tutorial(samples: Sequence[Sample]) -> Iterator[Row]:
    if not samples:
        return
    model = (
        "tiny ResNet-18, MSE, 2 devices"
        if cases.is_small()
        else "ResNet-50, 128 px, batch 120, MSE, 2 GPUs"
    )
    case = f"{tutorial_resnet50.CASE}, {model}"
    count = tutorial_resnet50.DEVICES
    one = best(samples, "eager", 1)
    ours, theirs = best(samples, "ours", count), best(samples, "tutorial", count)
    one_ms = time_of(one)
    options: dict[str, Any] = {"target": at_full_size(1.7), "smaller_is_better": False}
    if ours is not None and one_ms is not None:
        options["spread"] = spread_of(ours.values["step_ms"], one_ms)
    peers = {} if theirs is None else {PEERS["tutorial"]: ratio(one_ms, time_of(theirs))}
    yield row(case, SPEEDUP, "x", ratio(one_ms, time_of(ours)), peers=peers, **options)
    if one is not None:
        yield row_of(case, "one device, whole batch", one.values["step_ms"])
    for sample in sorted(samples, key=lambda sample: sample.chunks):
        if sample.engine == "ours" and not sample.failed:
            other = _by_split(samples, sample.chunks)
            made = row_of(case, f"split size {sample.chunks}", sample.values["step_ms"])
            yield made | {
                "peers": {} if other is None else {PEERS["tutorial"]: rounded(time_of(other))}
            }
    yield from failures(case, samples)


def _by_split(samples: Sequence[Sample], split: int) -> Sample | None:
    found = (
        s
        for s in samples
        if s.engine == "tutorial" and s.chunks == split and s.values.get("step_ms")
    )
    return next(found, None)
