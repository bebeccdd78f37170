"""The speedup of weight-gradient passes that run on two streams at once.

    one stream    ▮▮▮▮▮▮▮▮▮▮▮▮▮▮▮▮                 the same operations repeatedly,
    the other       ▮▮▮▮▮▮▮▮▮▮▮▮▮▮▮▮               on copies, half a pass later
                     │←  round →│

Kernels of one stream compute while kernels of the other wait for memory, and their last blocks
overlap. The time of a round is the difference between a long and a short run, divided by the
additional rounds; this removes the start and the end of a run. Enough copies exist that the
device's cache has lost one before its next use.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from placer import devices
from placer.capture.weight_grads.deferred import GradientQueue

LANES = 2
"""Streams of a weight-gradient pass; see ``placer.capture.weight_grads.deferred.Queue.branches``.
"""

SHORT, LONG = 1, 4
"""Rounds of the short and of the long run."""

# Bytes touched between two uses of a copy, in multiples of the cache's size.
_CACHES = 3


class _Copy(GradientQueue):
    """A copy of another queue that accumulates into copies of the gradients."""

    def __init__(self, queue: GradientQueue) -> None:
        super().__init__()
        self._gradients: dict[int, Tensor] = {}
        for addition in queue:
            x, gradient = (tensor.detach().clone() for tensor in (addition.x, addition.gradient))
            self.append(replace(addition, x=x, gradient=gradient))
            for weight in addition.weights:
                if weight.grad is not None:
                    self._gradients[id(weight)] = weight.grad.clone()

    @property
    def nbytes(self) -> int:
        """Return the bytes of all copied tensors."""
        tensors = [tensor for addition in self for tensor in (addition.x, addition.gradient)]
        return sum(tensor.nbytes for tensor in (*tensors, *self._gradients.values()))

    def gradient(self, weight: Tensor) -> Tensor | None:
        """Return the copy of a weight's gradient; None if it has none."""
        return self._gradients.get(id(weight))


def measure_share(
    queue: GradientQueue,
    alone_ms: float,
    device: torch.device,
    repeats: int,
    before: Callable[[], None],
) -> float:
    """Return the relative time of a weight-gradient pass on two streams.

    Args:
        queue: the weight gradients that a backward pass deferred.
        alone_ms: the time to compute them once, in milliseconds.
        device: a CUDA device.
        repeats: how often each run is timed.
        before: runs untimed before each run.

    Returns:
        The time of a round over the time of its passes one after another, between 1/2 and 1. It is
        1 if there is no memory for copies or the passes cannot be recorded.
    """
    if not queue or alone_ms <= 0:
        return 1.0
    try:
        copies = _copies(queue, device)
        rows = [partial(_row, copies, rounds, device, alone_ms / 2) for rounds in (SHORT, LONG)]
        replays = devices.record(rows, device)
    except (torch.OutOfMemoryError, devices.NotRecordable):
        return 1.0
    short, long = (
        statistics.median(times)
        for times in devices.queued_ms(replays, device, repeats, [before, before])
    )
    round_ms = (long - short) / (LONG - SHORT)
    # Two streams can neither more than halve the time nor make it longer than one after another;
    # noise could suggest both.
    return min(1.0, max(1 / LANES, round_ms / (LANES * alone_ms)))


def _copies(queue: GradientQueue, device: torch.device) -> Sequence[_Copy]:
    first = _Copy(queue)
    # enough copies to exceed the cache several times, but no more than one per pass of the long run
    wanted = -(-_CACHES * devices.cache_bytes(device) // max(1, first.nbytes))
    rounds = min(LONG, max(1, -(-wanted // LANES)))
    return [first, *(_Copy(queue) for _ in range(LANES * rounds - 1))]


def _row(copies: Sequence[_Copy], rounds: int, device: torch.device, behind_ms: float) -> None:
    """Run both streams for the given number of rounds, the second one ``behind_ms`` later."""

    def lane(number: int) -> None:
        if number:
            devices.pause(device, behind_ms)
        for index in range(rounds):
            copies[(LANES * index + number) % len(copies)].run()

    devices.side_by_side([partial(lane, number) for number in range(LANES)], device)
