"""The slowdown of a GPU at its power limit under a sustained load.

At first the clocks are at their maximum. Then the power limit lowers them, and under a sustained
load the control oscillates about once a second. So the mean time is longer than a measurement of a
few tenths of a second shows. A product of matrices on an H200, in ms::

    0.242 | 0.269  0.269  0.269 | 0.302 | 0.271  0.271 | 0.283  0.283 | 0.277 ...
        0.07 s               0.75 s     1 s          1.5 s            2 s
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch

from placer.devices.memory import release_cache
from placer.devices.names import synchronise
from placer.devices.recording import record
from placer.devices.timing.device_time import lasting_ms

LASTING_S = 2.0
"""Duration of a sustained load in seconds: two oscillations of the power control."""

SLOWER = 1.03
"""Work that slows down by this factor when the clocks drop keeps the device at its power limit."""

# Seconds until the clocks drop, until they are low, and until they start to oscillate.
_FULL_S, _LOWERED_S, _SWINGING_S = 0.03, 0.2, 0.6

_REST_S = 0.3
_SIDE, _PRODUCTS = 4096, 16


@cache
def lasting_share(device: torch.device) -> float:
    """Return the sustained time of power-limited work over its time in the first tenths.

    At least 1. Measured once per device with large matrix products, in about 2.5 s; 1 on the CPU,
    and if the products do not fit into memory.
    """
    if device.type != "cuda":
        return 1.0
    try:
        return lasting_over_lowered(_product_ms(device))
    except torch.OutOfMemoryError:
        return 1.0
    finally:
        release_cache()


def lasting_over_lowered(times_ms: Sequence[float]) -> float:
    """Return the sustained mean over the median before the clocks oscillate; at least 1.

    Args:
        times_ms: times of equal work that ran back to back, in milliseconds.
    """
    lasting = [(end, ms) for end, ms in _ends(times_ms) if end > _LOWERED_S]
    lowered = [ms for end, ms in lasting if end <= _SWINGING_S]
    return (
        max(1.0, statistics.fmean(ms for _, ms in lasting) / statistics.median(lowered))
        if lowered
        else 1.0
    )


def is_at_limit(times_ms: Sequence[float]) -> bool:
    """Return whether equal work slowed down within a tenth of a second, as at the power limit.

    Args:
        times_ms: times of back-to-back runs after a rest, in milliseconds.
    """
    full = [ms for end, ms in _ends(times_ms) if end <= _FULL_S] or times_ms[:1]
    last = times_ms[-len(full) :]
    return statistics.median(last) > SLOWER * statistics.median(full)


def _ends(times_ms: Sequence[float]) -> list[tuple[float, float]]:
    """Return each time with its end, in seconds from the start."""
    return [(end / 1e3, ms) for end, ms in zip(accumulate(times_ms), times_ms, strict=True)]


@torch.no_grad()
def _product_ms(device: torch.device) -> list[float]:
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    left, right = (torch.randn(_SIDE, _SIDE, device=device, dtype=dtype) for _ in range(2))
    made = torch.empty_like(left)

    def products() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(left, right, out=made)

    (replay,) = record([products], device)
    synchronise(device)
    # let the clocks recover, so that the measurement starts at full speed
    time.sleep(_REST_S)
    return lasting_ms([replay], device, _LOWERED_S + LASTING_S)[0]
