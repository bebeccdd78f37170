"""The share of its time that a half by weight takes where stages record two side by side.

    one lane     ▮▮▮▮▮▮▮▮▮▮▮▮▮▮▮▮                 the same operations over and over,
    the other      ▮▮▮▮▮▮▮▮▮▮▮▮▮▮▮▮               on copies, half a time behind
                     │←  round →│

Kernels of the one compute while those of the other wait for memory, and their last blocks run
together. A round is what a long row takes beyond a short one, so that it has neither the begin nor
the end of a row in it. There are as many copies as the device's cache would need to forget one
before it is used again.
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
"""So many halves by weight run at a time; see
``placer.capture.weight_grads.deferred.GradientQueue.branches``."""

SHORT, LONG = 1, 4
"""The rounds of the two rows."""

# Between two uses of a copy so many times the cache's size is used.
_CACHES = 3


class _Copy(GradientQueue):
    """What another queue has, copied; adds to copies of gradients."""

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
        """What all of it takes."""
        tensors = [tensor for addition in self for tensor in (addition.x, addition.gradient)]
        return sum(tensor.nbytes for tensor in (*tensors, *self._gradients.values()))

    def gradient(self, weight: Tensor) -> Tensor | None:
        """The copy; None for a weight that has no gradient."""
        return self._gradients.get(id(weight))


def measure_share(
    queue: GradientQueue,
    alone_ms: float,
    device: torch.device,
    repeats: int,
    before: Callable[[], None],
) -> float:
    """Time two lanes of what a backward pass left for later.

    Args:
        queue: what it left.
        alone_ms: the time of adding it once.
        device: a CUDA device.
        repeats: how often each row is timed.
        before: runs before each row, and is not timed.

    Returns:
        The time of a round over that of its halves one after another, at most 1; that where there
        is no memory for copies, or no recording.
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
    return min(1.0, max(1 / LANES, round_ms / (LANES * alone_ms)))


def _copies(queue: GradientQueue, device: torch.device) -> Sequence[_Copy]:
    first = _Copy(queue)
    # enough copies to exceed the cache several times, but no more than one per pass of the long run
    wanted = -(-_CACHES * devices.cache_bytes(device) // max(1, first.nbytes))
    rounds = min(LONG, max(1, -(-wanted // LANES)))
    return [first, *(_Copy(queue) for _ in range(LANES * rounds - 1))]


def _row(copies: Sequence[_Copy], rounds: int, device: torch.device, behind_ms: float) -> None:
    """Run lanes of so many rounds, the other one behind the first."""

    def lane(number: int) -> None:
        if number:
            devices.pause(device, behind_ms)
        for index in range(rounds):
            copies[(LANES * index + number) % len(copies)].run()

    devices.side_by_side([partial(lane, number) for number in range(LANES)], device)
