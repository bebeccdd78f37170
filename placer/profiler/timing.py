"""The time that a device needs for one layer, apart from the time that the host needs to launch it.

On CUDA the forward and the backward pass are recorded as CUDA graphs and replayed, so that launches do not count; what
cannot be recorded is timed by events in a queue that is full before the device begins. A CPU is host and device in one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from placer import devices
from placer.profiler.trial import Trial

_ENOUGH_S = 0.5
"""A layer that has taken so long on a CPU is not timed again: its noise is small beside it."""

_LAUNCHES = 3


@dataclass(frozen=True)
class LayerTime:
    """Times of one layer for one micro-batch, medians in milliseconds.

    Attributes:
        forward_ms: device time of the forward pass.
        backward_ms: device time of the backward pass; 0 in inference, and where no gradient flows.
        host_ms: time of the host to launch both, operation by operation.
    """

    forward_ms: float
    backward_ms: float
    host_ms: float


def measure_time(trial: Trial, training: bool, repeats: int) -> LayerTime:
    """Time the passes of a layer that has run before, backwards too in training.

    Args:
        trial: the layer.
        training: whether the backward pass is timed too.
        repeats: how often each is timed, at least once.
    """
    if trial.device.type != "cuda":
        return _cpu_time(trial, training, repeats)
    trial.forward()
    if training:
        trial.backward()
    flows = training and len(trial.gradients) > 0
    passes: list[Callable[[], None]] = [trial.forward, trial.backward] if flows else [trial.forward]
    host_ms = statistics.median(_launch_ms(trial, passes) for _ in range(_LAUNCHES))
    times = [statistics.median(column) for column in _cuda_times(trial, passes, repeats)]
    return LayerTime(times[0], times[1] if flows else 0.0, host_ms)


def _cuda_times(trial: Trial, passes: list[Callable[[], None]], repeats: int) -> list[list[float]]:
    try:
        # A backward pass reuses memory of the forward pass, so that each backward needs its own forward before it.
        return devices.queued_ms(devices.record(passes, trial.device), trial.device, repeats)
    except devices.NotRecordable:
        trial.writes = trial.gradients = ()
        return devices.queued_ms(passes, trial.device, repeats)


def _launch_ms(trial: Trial, passes: list[Callable[[], None]]) -> float:
    devices.synchronise(trial.device)
    began = time.perf_counter()
    for run in passes:
        run()
    launched = time.perf_counter()
    devices.synchronise(trial.device)
    return 1e3 * (launched - began)


def _cpu_time(trial: Trial, training: bool, repeats: int) -> LayerTime:
    forward: list[float] = []
    backward: list[float] = []
    spent = 0.0
    while len(forward) < repeats and spent < _ENOUGH_S:
        began = time.perf_counter()
        trial.forward()
        middle = time.perf_counter()
        if training:
            trial.backward()
        ended = time.perf_counter()
        forward.append(1e3 * (middle - began))
        backward.append(1e3 * (ended - middle) if trial.gradients else 0.0)
        spent += ended - began
    host = [sum(pair) for pair in zip(forward, backward, strict=True)]
    return LayerTime(statistics.median(forward), statistics.median(backward), statistics.median(host))


def significant(value: float, digits: int = 4) -> float:
    """The value with so many significant digits, which keeps profiles small and easy to compare."""
    return float(f"{value:.{digits}g}")


__all__ = ["LayerTime", "measure_time", "significant"]
