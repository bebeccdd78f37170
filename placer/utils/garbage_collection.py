"""A pause of Python's search for unreachable cycles of objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause the collector inside the block, or as a decorator during a call.

    It looks through all objects again and again while imports and captures make millions that stay.
    For an estimate of 32 blocks, that took more than a tenth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
