"""Device time of one layer, measured separately from the host's launch time.

On CUDA every pass is replayed as a CUDA graph, so launches do not count. Passes that cannot be
recorded are timed by events in a queue that fills before the device begins. Before each pass, the
device's cache is cleared. Then the pass's inputs are written again, as a neighbouring layer would
just have done: the reads, or the incoming gradients. Equally many bytes are read, as a neighbour
does:

    clear ─ write reads ─ ▮forward▮ ─ clear ─ write gradients ─ ▮backward▮ ─ ...      ▮ is timed

So weights and saved activations come from memory, as in a step of the whole model. Of a large
value, the cache holds no more than its producer would have left. At the power limit, times are
scaled to a sustained load (see ``placer.devices.timing.sustained_load``). Stages run two
weight-gradient passes concurrently; this is timed separately, see ``concurrent_passes.py``. On a
CPU, device and host are the same, and caches are not cleared.
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

# A CPU layer that has run this long, in seconds, is not timed again: its noise is small.
_ENOUGH_S = 0.5

_LAUNCHES = 3
# Seconds of work before timing, so that clocks are at their working level.
_WARM_S = 0.1


@dataclass(frozen=True)
class LayerTime:
    """Times of one layer for one micro-batch: medians in milliseconds.

    Attributes:
        forward_ms: device time of the forward pass.
        backward_ms: device time of the backward pass, which accumulates into existing gradients; 0
            in inference, and if no gradient flows.
        host_ms: time of the host to launch both, operation by operation.
        weight_grad_ms: the part of ``backward_ms`` for deferrable weight gradients (linear layers
            and convolutions), see ``placer.capture.weight_grads.deferred``.
        spread: half the interquartile range of the total times, over their median.
    """

    forward_ms: float
    backward_ms: float
    host_ms: float
    weight_grad_ms: float = 0.0
    spread: float = 0.0


def measure_time(trial: Trial, training: bool, repeats: int, halves: bool = True) -> LayerTime:
    """Time the passes of a layer that has run before; in training, backward too.

    Args:
        trial: the layer.
        training: whether the backward pass is timed too.
        repeats: how often each pass is timed, at least once.
        halves: whether its backward pass has a deferrable part.
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
    """Return the medians of the columns: forward pass and, if any, both backward parts."""
    forward_ms, *halves = (statistics.median(column) for column in columns)
    # The spread is of whole steps: noise of one pass is less important than noise of all.
    whole = [sum(times) for times in zip(*columns, strict=True)]
    return LayerTime(forward_ms, sum(halves), host_ms, sum(halves[1:]), spread(whole))


def measure_step(trial: Trial, step: Callable[[], None], repeats: int) -> float:
    """Time an optimizer's step on the trial's parameters, with gradients of zeros.

    Args:
        trial: the layer.
        step: runs one step of the optimizer of ``trial.parameters``.
        repeats: how often it is timed, at least once.

    Returns:
        The median in milliseconds.
    """
    trial.writes = trial.gradients = ()
    trial.set_gradients(present=True)
    try:
        step()  # the first step creates the optimizer's state
        if trial.device.type != "cuda":
            return statistics.median(_cpu_times([step], repeats)[0][0])
        return statistics.median(devices.queued_ms([step], trial.device, repeats)[0])
    finally:
        trial.set_gradients(present=False)


def _cuda_times(
    trial: Trial, passes: Sequence[Callable[[], None]], repeats: int
) -> tuple[list[list[float]], float]:
    """Return the times of every pass, and the median time to launch all of them."""
    host_ms = statistics.median(_launch_ms(trial.device, passes) for _ in range(_LAUNCHES))
    # A cache policy may retain frequently used lines in one sweep of the cache's size; a sweep of
    # twice its size evicts them.
    # float32 has 4 bytes.
    cache = torch.zeros(2 * devices.cache_bytes(trial.device) // 4, device=trial.device)
    fresh: list[Sequence[Any]] = [trial.reads, trial.write_gradients if trial.flows else (), ()]
    before = [_rewriting(cache, neighbours) for neighbours in fresh[: len(passes)]]
    try:
        # Passes replay in this order, because a backward graph reads memory that its forward graph
        # wrote and frees it for reuse.
        replays = devices.record(passes, trial.device)
    except devices.NotRecordable:
        trial.writes = trial.gradients = ()
        devices.lasting_ms(passes, trial.device, _WARM_S)
        return devices.queued_ms(passes, trial.device, repeats, before), host_ms
    extra_ms = devices.replay_ms(trial.device)
    # the warm-up also shows whether the layer slows down, as it does at the power limit
    warming = devices.lasting_ms(replays, trial.device, _WARM_S)
    columns = devices.queued_ms(replays, trial.device, repeats, before)
    at_limit = devices.is_at_limit([sum(times) for times in zip(*warming, strict=True)])
    longer = devices.lasting_share(trial.device) if at_limit else 1.0
    # subtract the launch of a graph, which a layer inside a larger graph does not have
    columns = [[longer * max(0.0, value - extra_ms) for value in column] for column in columns]
    if passes[-1] == trial.accumulate_later:
        alone_ms = statistics.median(columns[-1])
        share = measure_share(trial.deferred, alone_ms, trial.device, repeats, before[-1])
        columns[-1] = [share * value for value in columns[-1]]
    return columns, host_ms


def _rewriting(cache: Tensor, neighbours: Sequence[Any]) -> Callable[[], None]:
    """Return a function that leaves in the cache what a neighbouring layer would leave.

    This is the tensors that it wrote, and equally many bytes that it read.
    """
    tensors = [
        tensor for tensor in neighbours if isinstance(tensor, Tensor) and has_own_memory(tensor)
    ]
    written = [
        tensor.data
        for tensor in tensors
        if not (tensor.is_floating_point() and tensor.itemsize == 1)
    ]
    pairs = [(tensor, _zeros_in(cache, tensor)) for tensor in written]

    @torch.no_grad()
    def rewrite() -> None:
        # read, not write: dirty lines would be written back while the layer is timed
        cache.sum()
        for tensor, zeros in pairs:
            if zeros is None:
                tensor.mul_(True)
            else:
                torch.add(tensor, zeros, alpha=0, out=tensor)

    return rewrite


def _zeros_in(cache: Tensor, tensor: Tensor) -> Tensor | None:
    """Return zeros inside the cache buffer with a tensor's layout; None if they do not fit."""
    size_bytes = tensor.untyped_storage().nbytes()
    if (
        tensor.device != cache.device
        or tensor.dtype == torch.bool
        or not 0 < size_bytes <= cache.nbytes
    ):
        return None
    # a view of the flushed buffer, so that reading it takes no further memory
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
    """Return half the interquartile range of the times over their median; 0 for one time."""
    if len(times) < 2 or not (middle := statistics.median(times)):
        return 0.0
    # Quartiles ignore single outliers, such as an interrupt of the host.
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / 2 / middle


def significant(value: float, digits: int = 4) -> float:
    """Round to significant digits, which keeps profiles small and comparable."""
    return float(f"{value:.{digits}g}")


__all__ = ["LayerTime", "measure_step", "measure_time", "significant", "spread"]
