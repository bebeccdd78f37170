"""The kernels of attention for texts whose length changes from pass to pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.backends import cuda

_lock = threading.Lock()


class _Blocks:
    """The blocks of all threads that are without cuDNN's attention now.

    Attributes:
        count: their number.
        was_enabled: whether cuDNN's attention was enabled before the first.
    """

    count = 0
    was_enabled = False


@contextmanager
def without_attention_plans() -> Iterator[None]:
    """Compute attention without cuDNN inside the block.

    CuDNN builds a plan for each new shape on each device, which takes the host 40 to 70 ms (H200,
    torch 2.11); a cache that grows by a token has a new shape. From Hopper on, torch prefers cuDNN.
    Its other kernels are slower on long texts, but need no plan.

    The choice is the process's: other threads get the same kernels meanwhile. Nothing changes if
    the user has disabled one of the other kernels.
    """
    with _lock:
        _Blocks.count += 1
        if _Blocks.count == 1:
            _Blocks.was_enabled = cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
            cuda.enable_cudnn_sdp(_Blocks.was_enabled and not _has_alternatives())
    try:
        yield
    finally:
        with _lock:
            _Blocks.count -= 1
            if not _Blocks.count:
                cuda.enable_cudnn_sdp(_Blocks.was_enabled)


def _has_alternatives() -> bool:
    kernels = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled)
    return all(is_enabled() for is_enabled in kernels)  # type: ignore[no-untyped-call]
