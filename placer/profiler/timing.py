"""The time that a device needs for one layer, apart from the time that the host needs to launch it.

On CUDA every pass is recorded as a CUDA graph and replayed, so that launches do not count; what
cannot be recorded is timed by events in a queue that is full before the device begins. Before each
pass the device's cache is emptied, and then what a neighbour would just have made (the values that
are read, or the gradients that come back) is written again while as much is read beside it, as a
neighbour reads what it works on:

    clear ─ write reads ─ ▮forward▮ ─ clear ─ write gradients ─ ▮backward▮ ─ ...        ▮ is timed

So weights, and what was kept for the backward pass, come from memory, as they do in a step of the
whole model; and of a value that nearly fills the cache no more is there than its neighbour would
have left. What keeps a device at its power limit is told as long as it takes under a load that
lasts (see ``placer.devices.sustained_load``). Stages record halves by weight two at a time, which
is timed apart, see ``concurrent_passes.py``. A CPU is host and device in one, and its caches are
left as they are.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.devices.tensor_parts import has_own_memory
from placer.profiler.backward_split.concurrent_passes import measure_share
from placer.profiler.trial import Trial

# A layer that has taken so long on a CPU is not timed again: its noise is small beside it.
_ENOUGH_S = 0.5

_LAUNCHES = 3
# How long a device works on a layer before it is timed, so that its clocks are those of work.
_WARM_S = 0.1


@dataclass(frozen=True)
class LayerTime:
    """Times of one layer for one micro-batch, medians in milliseconds.

    Attributes:
        forward_ms: device time of the forward pass.
        backward_ms: device time of the backward pass, which adds to gradients that are there; 0 in
            inference, and where no gradient flows.
        host_ms: time of the host to launch both, operation by operation.
        weights_ms: the part of ``backward_ms`` that gradients of weights take which zero-bubble
            schedules leave for later: of linear layers and convolutions, see
            ``placer.capture.weight_grads.splittable_ops``.
        spread: half of the range that holds the middle half of the timings of both passes, over
            their median.
    """

    forward_ms: float
    backward_ms: float
    host_ms: float
    weights_ms: float = 0.0
    spread: float = 0.0


def measure_time(trial: Trial, training: bool, repeats: int, halves: bool = True) -> LayerTime:
    """Time the passes of a layer that has run before, backwards too in training.

    Args:
        trial: the layer.
        training: whether the backward pass is timed too.
        repeats: how often each is timed, at least once.
        halves: whether its backward pass has a half that can wait.
    """
    passes: list[Callable[[], None]] = [trial.forward]
    try:
        if training and trial.flows:
            trial.set_gradients(present=True)
            passes = [trial.forward, trial.accumulate]
            if halves:
                passes = [trial.forward_in_halves, trial.accumulate, trial.accumulate_later]
        on_cuda = trial.device.type == "cuda"
        columns, host_ms = (
            _cuda_times(trial, passes, repeats) if on_cuda else _cpu_times(passes, repeats)
        )
    finally:
        trial.set_gradients(present=False)
    return _summary(columns, host_ms)


def _summary(columns: Sequence[Sequence[float]], host_ms: float) -> LayerTime:
    """The medians of the times of a forward pass and, if there are any, of both halves of a
    backward pass.
    """
    forward_ms, *halves = (statistics.median(column) for column in columns)
    whole = [sum(times) for times in zip(*columns, strict=True)]
    return LayerTime(forward_ms, sum(halves), host_ms, sum(halves[1:]), spread(whole))


def measure_step(trial: Trial, step: Callable[[], None], repeats: int) -> float:
    """Time an optimizer's step on the trial's parameters, which are given gradients for it.

    Args:
        trial: the layer.
        step: steps the optimizer of ``trial.parameters``.
        repeats: how often it is timed, at least once.

    Returns:
        The median in milliseconds.
    """
    trial.writes = trial.gradients = ()
    trial.set_gradients(present=True)
    try:
        step()  # the first one makes the optimizer's state
        if trial.device.type != "cuda":
            return statistics.median(_cpu_times([step], repeats)[0][0])
        return statistics.median(devices.queued_ms([step], trial.device, repeats)[0])
    finally:
        trial.set_gradients(present=False)


def _cuda_times(
    trial: Trial, passes: Sequence[Callable[[], None]], repeats: int
) -> tuple[list[list[float]], float]:
    """The times of every pass, and the median time to launch all of them."""
    host_ms = statistics.median(_launch_ms(trial.device, passes) for _ in range(_LAUNCHES))
    # A cache may keep what is used often in a way that one pass through it does not push out: twice
    # its size does.
    cache = torch.zeros(2 * devices.cache_bytes(trial.device) // 4, device=trial.device)
    fresh: list[Sequence[Any]] = [trial.reads, trial.write_gradients if trial.flows else (), ()]
    before = [_rewriting(cache, neighbours) for neighbours in fresh[: len(passes)]]
    try:
        # A backward pass reuses memory of the forward pass, so that each backward needs its own
        # forward before it.
        replays = devices.record(passes, trial.device)
    except devices.NotRecordable:
        trial.writes = trial.gradients = ()
        devices.lasting_ms(passes, trial.device, _WARM_S)
        return devices.queued_ms(passes, trial.device, repeats, before), host_ms
    extra_ms = devices.replay_ms(trial.device)
    warming = devices.lasting_ms(replays, trial.device, _WARM_S)
    columns = devices.queued_ms(replays, trial.device, repeats, before)
    at_limit = devices.is_at_limit([sum(times) for times in zip(*warming, strict=True)])
    longer = devices.lasting_share(trial.device) if at_limit else 1.0
    columns = [[longer * max(0.0, value - extra_ms) for value in column] for column in columns]
    if passes[-1] == trial.accumulate_later:
        alone_ms = statistics.median(columns[-1])
        share = measure_share(trial.deferred, alone_ms, trial.device, repeats, before[-1])
        columns[-1] = [share * value for value in columns[-1]]
    return columns, host_ms


def _rewriting(cache: Tensor, neighbours: Sequence[Any]) -> Callable[[], None]:
    """What leaves in the device's cache no more than a neighbour would: what it just made, and what
    it read for it.
    """
    tensors = [
        tensor for tensor in neighbours if isinstance(tensor, Tensor) and has_own_memory(tensor)
    ]
    written = [
        tensor.data
        for tensor in tensors
        if not (tensor.is_floating_point() and tensor.itemsize == 1)
    ]
    pairs = [(tensor, _beside(cache, tensor)) for tensor in written]

    @torch.no_grad()
    def rewrite() -> None:
        # reads it: what was written would have to go to memory while the layer is timed
        cache.sum()
        for tensor, beside in pairs:
            if beside is None:
                tensor.mul_(True)
            else:
                torch.add(tensor, beside, alpha=0, out=tensor)

    return rewrite


def _beside(cache: Tensor, tensor: Tensor) -> Tensor | None:
    """Zeros in the cache's place, laid out like a tensor; None where that is larger or elsewhere."""
    size_bytes = tensor.untyped_storage().nbytes()
    if (
        tensor.device != cache.device
        or tensor.dtype == torch.bool
        or not 0 < size_bytes <= cache.nbytes
    ):
        return None
    zeros = cache.view(torch.uint8)[: size_bytes // tensor.itemsize * tensor.itemsize].view(
        tensor.dtype
    )
    return zeros.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _launch_ms(device: torch.device, passes: Sequence[Callable[[], None]]) -> float:
    devices.synchronise(device)
    began = time.perf_counter()
    for run in passes:
        run()
    launched = time.perf_counter()
    devices.synchronise(device)
    return 1e3 * (launched - began)


def _cpu_times(
    passes: Sequence[Callable[[], None]], repeats: int
) -> tuple[list[list[float]], float]:
    columns: list[list[float]] = [[] for _ in passes]
    began = time.perf_counter()
    while len(columns[0]) < repeats and (not columns[0] or time.perf_counter() - began < _ENOUGH_S):
        for run, column in zip(passes, columns, strict=True):
            started = time.perf_counter()
            run()
            column.append(1e3 * (time.perf_counter() - started))
    return columns, statistics.median(sum(times) for times in zip(*columns, strict=True))


def spread(times: Sequence[float]) -> float:
    """Half of the range that holds the middle half of these times, over their median; 0 for a
    single one.
    """
    if len(times) < 2 or not (middle := statistics.median(times)):
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / 2 / middle


def significant(value: float, digits: int = 4) -> float:
    """The value with so many significant digits, which keeps profiles small and easy to compare."""
    return float(f"{value:.{digits}g}")


__all__ = ["LayerTime", "measure_step", "measure_time", "significant", "spread"]
