"""Samples as rows: speed-ups over one GPU beside the peers', and what became of those who have none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from ..record import row
from . import cases, distributed, gpipe, large, overhead, stream, switching, tutorial, tutorial_resnet50
from .sample import Sample

Row = dict[str, Any]
PEERS = {
    distributed.ENGINE: "torch.distributed 1F1B",
    distributed.INTERLEAVED: "torch.distributed interleaved",
    distributed.ZERO_BUBBLE: "torch.distributed zero-bubble",
    tutorial.ENGINE: "tutorial's split",
    gpipe.ENGINE: "torchgpipe",
    stream.DISPATCH: "accelerate's dispatch_model",
}
TARGETS = {("resnet101", 4): 2.8, ("gpt", 4): 3.5, ("unet", 4): 2.8}
TWO_DEVICES = 1.85
OVER_PEERS = 1.3
STREAMS = {("resnet101", 4): 3.3, ("gpt", 4): 3.8}
SPEEDUP = "training step, speed-up over eager PyTorch on one device"


def rows(samples: Sequence[Sample]) -> list[Row]:
    """All rows of these samples; targets count at full size alone."""
    made: list[Row] = []
    for name in cases.FULL:
        made += _training(name, _of(samples, name))
    for name in stream.NAMES:
        made += _stream(name, _of(samples, stream.PREFIX + name))
    made += _switching(_of(samples, switching.CASE))
    made += _overhead(_of(samples, overhead.CASE))
    made += _large(_of(samples, large.CASE))
    made += _tutorial(_of(samples, tutorial_resnet50.CASE))
    return made


def belongs(case: str, name: str) -> bool:
    """Whether a row's case is one of the case that is selected by this name."""
    if name.startswith(stream.PREFIX):
        return case.startswith(f"inference stream, {cases.training(name.removeprefix(stream.PREFIX)).label}")
    return case.startswith(cases.training(name).label if name in cases.FULL else name)


def _of(samples: Sequence[Sample], case: str) -> list[Sample]:
    return [sample for sample in samples if sample.case == case]


def _target(value: float) -> float | None:
    return None if cases.is_small() else value


def _time(sample: Sample | None, measure: str = "step_ms") -> float | None:
    return median(sample.values[measure]) if sample is not None and sample.values.get(measure) else None


def _best(samples: Sequence[Sample], engine: str, devices: int) -> Sample | None:
    """The one with the shortest step."""
    found = [s for s in samples if s.engine == engine and s.devices == devices and s.values.get("step_ms")]
    return min(found, key=lambda sample: median(sample.values["step_ms"]), default=None)


def _rounded(value: float | None) -> float | None:
    """To four digits."""
    return None if value is None else float(f"{value:.4g}")


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else _rounded(above / below)


def _spread(values: Sequence[float], over: float | None = None) -> tuple[float, float]:
    """The smallest and the largest, of a time divided by these if one is given."""
    numbers = sorted(values if over is None else [over / value for value in values])
    return float(f"{numbers[0]:.4g}"), float(f"{numbers[-1]:.4g}")


def _failures(case: str, samples: Sequence[Sample]) -> Iterator[Row]:
    """Who has no value, and why."""
    for sample in samples:
        if sample.failed:
            where = f"{sample.devices} devices, {sample.chunks} chunks: " if sample.devices else ""
            yield row(case, f"no value of {PEERS.get(sample.engine, sample.engine)}: {where}{sample.failed}", "", None)


def _training(name: str, samples: Sequence[Sample]) -> Iterator[Row]:
    if not samples:
        return
    label = cases.training(name).label
    eager = _best(samples, "eager", 1)
    if eager is not None:
        spread = _spread(eager.values["step_ms"])
        yield row(f"{label}, 1 device", "training step, eager PyTorch", "ms", _rounded(_time(eager)), spread=spread)
    for count in cases.counts():
        yield from _pipelined(f"{label}, {count} devices", name, samples, eager, count)
    yield from _failures(label, samples)


def _pipelined(case: str, name: str, samples: Sequence[Sample], eager: Sample | None, count: int) -> Iterator[Row]:
    ours, one_ms = _best(samples, "ours", count), _time(eager)
    peers = {label: _best(samples, engine, count) for engine, label in PEERS.items()}
    ratios = {label: _ratio(one_ms, _time(sample)) for label, sample in peers.items() if sample is not None}
    wanted = TWO_DEVICES if count == 2 else TARGETS.get((name, count))
    options: dict[str, Any] = {"smaller_is_better": False, "peers": ratios}
    if wanted is not None:
        options["target"] = _target(wanted)
    if ours is None:
        yield row(case, SPEEDUP, "x", None, **options)
        return
    times, step_ms = ours.values["step_ms"], _time(ours)
    assert step_ms is not None
    spread = _spread(times, one_ms) if one_ms is not None else None
    yield row(case, SPEEDUP, "x", _ratio(one_ms, step_ms), spread=spread, **options)
    others = [time for sample in peers.values() if (time := _time(sample)) is not None]
    if others:
        value, target = _ratio(min(others), step_ms), _target(OVER_PEERS)
        options = {"spread": _spread(times, min(others)), "target": target, "smaller_is_better": False}
        yield row(case, "training step, over the best peer", "x", value, **options)
    shown = {label: _rounded(_time(sample)) for label, sample in peers.items() if sample is not None}
    yield row(case, "training step", "ms", _rounded(step_ms), spread=_spread(times), peers=shown)
    yield from _details(case, ours, step_ms)
    yield from _by_processes(case, samples, count)


def _details(case: str, ours: Sample, step_ms: float) -> Iterator[Row]:
    """What stands behind our step."""
    values = ours.values
    yield row(case, "micro-batches of the fastest step", "", ours.chunks)
    yield row(case, "step predicted by the placement, optimizer included", "ms", _rounded(_time(ours, "predicted_ms")))
    host = values["host_ms"]
    target = _target(float(f"{step_ms / 4:.4g}"))
    measure = "host issues a step; at most a quarter of it is wanted"
    yield row(case, measure, "ms", _rounded(median(host)), spread=_spread(host), target=target)
    yield row(case, "loss, largest difference to the unsplit model", "", _rounded(_time(ours, "loss_difference")))
    if not cases.is_small():
        yield row(case, "stages that run without a CUDA graph", "", _time(ours, "eager_stages"))


def _by_processes(case: str, samples: Sequence[Sample], count: int) -> Iterator[Row]:
    """The step of ``placer.distributed``, where it was run."""
    found = _best(samples, distributed.PLACED, count)
    if found is not None:
        times = found.values["step_ms"]
        measure = "training step by placer.distributed, a process for each device"
        yield row(case, measure, "ms", _rounded(median(times)), spread=_spread(times))


def _stream(name: str, samples: Sequence[Sample]) -> Iterator[Row]:
    if not samples:
        return
    label = f"inference stream, {cases.training(name).label}"
    one = _best(samples, "eager", 1)
    if one is not None:
        spread = _spread(one.values["step_ms"])
        yield row(f"{label}, 1 device", "a batch, eager PyTorch", "ms", _rounded(_time(one)), spread=spread)
    for count in cases.counts():
        yield from _streamed(f"{label}, {count} devices", name, samples, one, count)
    yield from _failures(label, samples)


def _streamed(case: str, name: str, samples: Sequence[Sample], one: Sample | None, count: int) -> Iterator[Row]:
    ours, one_ms = _best(samples, "ours", count), _time(one)
    peers = {label: _best(samples, engine, count) for engine, label in PEERS.items()}
    options: dict[str, Any] = {
        "smaller_is_better": False,
        "peers": {label: _ratio(one_ms, _time(sample)) for label, sample in peers.items() if sample is not None},
    }
    if (name, count) in STREAMS:
        options["target"] = _target(STREAMS[name, count])
    measure = "a batch in a stream, speed-up over eager PyTorch on one device"
    if ours is None:
        yield row(case, measure, "x", None, **options)
        return
    times = ours.values["step_ms"]
    if one_ms is not None:
        options["spread"] = _spread(times, one_ms)
    yield row(case, measure, "x", _ratio(one_ms, _time(ours)), **options)
    shown = {label: _rounded(_time(sample)) for label, sample in peers.items() if sample is not None}
    yield row(case, "a batch in a stream", "ms", _rounded(_time(ours)), spread=_spread(times), peers=shown)
    yield row(case, "batches that it is cut into, where fastest", "", ours.chunks)
    yield row(case, "a batch, predicted from the profile", "ms", _rounded(_time(ours, "predicted_ms")))
    yield _row_of(case, "host issues a batch", ours.values["host_ms"])
    difference = _time(ours, "difference")
    yield row(case, "result, largest difference to the unsplit model, over the largest value", "", difference)
    yield row(case, "stages that run without a CUDA graph", "", _time(ours, "eager_stages"))


def _switching(samples: Sequence[Sample]) -> Iterator[Row]:
    for sample in samples:
        where = f"{sample.devices} devices"
        if sample.engine == "clones" and not sample.failed:
            case = f"{switching.CASE}, 100-layer model, enable_clone, {where}"
            measure = "update_flow, and the first call's extra"
            yield _row_of(case, measure, sample.values["switch_ms"], 1.0)
            yield _row_of(case, "update_flow alone", sample.values["update_flow_ms"])
        elif sample.engine == "moves" and not sample.failed:
            case = f"{switching.CASE}, {sample.values['gigabytes'][0]:.2g} GB model, {where}"
            yield _row_of(case, "update_flow, every layer moves", sample.values["move_ms"], 1000.0)
    yield from _failures(switching.CASE, samples)


def _row_of(case: str, measure: str, times: Sequence[float], target: float | None = None) -> Row:
    wanted = None if target is None else _target(target)
    return row(case, measure, "ms", _rounded(median(times)), spread=_spread(times), target=wanted)


def _overhead(samples: Sequence[Sample]) -> Iterator[Row]:
    model = "tiny ResNet-18, 1 device" if cases.is_small() else "ResNet-50, 224 px, batch 32, TF32, 1 GPU"
    case = f"{overhead.CASE}, {model}"
    by_engine = {sample.engine: sample for sample in samples if not sample.failed}
    for measure, suffix in (("forward", " forward"), ("training step", "")):
        ours, eager = by_engine.get(f"ours{suffix}"), by_engine.get(f"eager{suffix}")
        if ours is None or eager is None:
            continue
        alone = median(eager.values["step_ms"])
        recorded = _ratio(_time(by_engine.get(f"graph{suffix}")), alone)
        peers = {} if recorded is None else {"the model alone, as a CUDA graph": recorded}
        times = [time / alone for time in ours.values["step_ms"]]
        value, spread = _rounded(median(times)), _spread(times)
        name = f"{measure} by DataFlow, over the eager model"
        yield row(case, name, "x", value, spread=spread, target=_target(1.02), peers=peers)
    streamed, graph = by_engine.get("ours stream"), by_engine.get("graph forward")
    if streamed is not None and graph is not None:
        alone = median(graph.values["step_ms"])
        times = [time / alone for time in streamed.values["step_ms"]]
        name = "a batch in a stream, over the model alone as a CUDA graph"
        yield row(case, name, "x", _rounded(median(times)), spread=_spread(times), target=_target(1.02))
    yield from _failures(case, samples)


def _large(samples: Sequence[Sample]) -> Iterator[Row]:
    """That it trains where one device is too small, and the memory of the fullest one."""
    for sample in samples:
        if sample.failed or sample.engine != "ours":
            continue
        values = sample.values
        model = f"GPT of {values['parameters'][0] / 1e9:.3g} billion parameters, Adam, float32"
        case = f"{large.CASE}, {'tiny GPT' if cases.is_small() else model}, {sample.devices} devices"
        yield _row_of(case, "training step", values["step_ms"])
        losses = values["loss"]
        measure = f"loss after {len(losses)} steps on one batch, over the first"
        yield row(case, measure, "x", _ratio(losses[-1], losses[0]), target=_target(1.0))
        if values["peak_bytes"]:
            fullest = max(values["peak_bytes"]) / 2**30
            yield row(case, "memory of the fullest device", "GiB", _rounded(fullest))
            ratios = [b / a for a, b in zip(values["peak_bytes"], values["predicted_bytes"], strict=True)]
            yield row(case, "memory predicted, over used", "x", _rounded(max(ratios)), spread=_spread(ratios))
    yield from _failures(large.CASE, samples)


def _tutorial(samples: Sequence[Sample]) -> Iterator[Row]:
    if not samples:
        return
    model = "tiny ResNet-18, MSE, 2 devices" if cases.is_small() else "ResNet-50, 128 px, batch 120, MSE, 2 GPUs"
    case = f"{tutorial_resnet50.CASE}, {model}"
    count = tutorial_resnet50.DEVICES
    one = _best(samples, "eager", 1)
    ours, theirs = _best(samples, "ours", count), _best(samples, "tutorial", count)
    one_ms = _time(one)
    options: dict[str, Any] = {"target": _target(1.7), "smaller_is_better": False}
    if ours is not None and one_ms is not None:
        options["spread"] = _spread(ours.values["step_ms"], one_ms)
    peers = {} if theirs is None else {PEERS["tutorial"]: _ratio(one_ms, _time(theirs))}
    yield row(case, SPEEDUP, "x", _ratio(one_ms, _time(ours)), peers=peers, **options)
    if one is not None:
        yield _row_of(case, "one device, whole batch", one.values["step_ms"])
    for sample in samples:
        if sample.engine == "ours" and not sample.failed:
            other = _by_split(samples, sample.chunks)
            made = _row_of(case, f"split size {sample.chunks}", sample.values["step_ms"])
            yield made | {"peers": {} if other is None else {PEERS["tutorial"]: _rounded(_time(other))}}
    yield from _failures(case, samples)


def _by_split(samples: Sequence[Sample], split: int) -> Sample | None:
    found = (s for s in samples if s.engine == "tutorial" and s.chunks == split and s.values.get("step_ms"))
    return next(found, None)
