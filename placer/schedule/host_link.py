"""The copies of resting parameters to one device in a pass, over one link.

The resting layers r0, r1, ... of a device take two buffers in turn. Each has a copy ahead of the
layer, and possibly one of chosen experts while it runs, once their router has run::

    link      [r0][r1]   [chosen, r0][r2]      [chosen, r1][r3] ...
    device          [r0.............][r1..................][r2 ...

The link carries them one by one. The copy ahead of a layer waits until the layer before the
previous one has finished, which frees its buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class HostCopy(NamedTuple):
    """The times of the copies of one layer.

    Attributes:
        ahead_ms: before the layer runs.
        chosen_ms: while it runs, of the experts that its tokens choose; 0 without any.
    """

    ahead_ms: float
    chosen_ms: float


class HostLink:
    """The link to one device in a pass.

    Args:
        copies: of the device's resting layers, in execution order.
    """

    def __init__(self, copies: Sequence[HostCopy]) -> None:
        self._copies = copies
        self._copied_ms: list[float] = []
        self._finish_ms: list[float] = []
        self._free_ms = 0.0

    def run(self, start_ms: float, forward_ms: float) -> float:
        """Return the finish of the next resting layer.

        Args:
            start_ms: when the device is free and the layer's inputs are there.
            forward_ms: time of the layer.
        """
        number = len(self._finish_ms)
        # The next layer's copy comes first: its buffer is free when this layer begins.
        while len(self._copied_ms) < min(number + 2, len(self._copies)):
            later = len(self._copied_ms)
            emptied_ms = self._finish_ms[later - 2] if later > 1 else 0.0
            self._free_ms = max(self._free_ms, emptied_ms) + self._copies[later].ahead_ms
            self._copied_ms.append(self._free_ms)
        start_ms = max(start_ms, self._copied_ms[number])
        if chosen_ms := self._copies[number].chosen_ms:
            start_ms = self._free_ms = max(start_ms, self._free_ms) + chosen_ms
        self._finish_ms.append(start_ms + forward_ms)
        return self._finish_ms[-1]
