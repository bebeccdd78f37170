"""How much longer a GPU at its power limit takes for work under a load that lasts.

When work begins the clocks are full. Then the power limit lowers them, and under a load that lasts the control swings,
about once a second, so that the mean is longer than what a few tenths of a second show. A product of matrices on an
H200, in ms::

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

from placer.devices.device_time import lasting_ms
from placer.devices.memory import release_cache
from placer.devices.names import synchronise
from placer.devices.recording import record

LASTING_S = 2.0
"""So long a load is that lasts: two swings of the control."""

SLOWER = 1.03
"""Work that takes so much longer once the clocks are lowered keeps a device at its power limit."""

# Until when clocks are full, and from when until when they are lowered and do not swing yet.
_FULL_S, _LOWERED_S, _SWINGING_S = 0.03, 0.2, 0.6

_REST_S = 0.3
_SIDE, _PRODUCTS = 4096, 16


@cache
def lasting_share(device: torch.device) -> float:
    """What work at the power limit takes under a load that lasts, over what it takes after some
    tenths of a second.

    At least 1; measured once, with large products, in about 2.5 s. It is 1 where there is no room
    for them, and of what is no CUDA device.
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
    """The mean of the times of equal work over the median of those while clocks did not swing yet,
    at least 1.

    Args:
        times_ms: one after another, without a rest.
    """
    lasting = [(end, ms) for end, ms in _ends(times_ms) if end > _LOWERED_S]
    lowered = [ms for end, ms in lasting if end <= _SWINGING_S]
    return (
        max(1.0, statistics.fmean(ms for _, ms in lasting) / statistics.median(lowered))
        if lowered
        else 1.0
    )


def is_at_limit(times_ms: Sequence[float]) -> bool:
    """Whether equal work became slower while it ran for the first tenth of a second, as it does at
    the power limit.

    Args:
        times_ms: one after another, without a rest, after a rest.
    """
    full = [ms for end, ms in _ends(times_ms) if end <= _FULL_S] or times_ms[:1]
    last = times_ms[-len(full) :]
    return statistics.median(last) > SLOWER * statistics.median(full)


def _ends(times_ms: Sequence[float]) -> list[tuple[float, float]]:
    """Each time with when it was over, in seconds from the begin."""
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
    time.sleep(_REST_S)
    return lasting_ms([replay], device, _LOWERED_S + LASTING_S)[0]
