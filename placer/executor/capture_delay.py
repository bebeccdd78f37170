"""Delayed capture: calls use hooks until they have cost as much time as a capture would.

So a few calls need no capture, and many calls take at most twice the necessary time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_KNOWN_KINDS = 1000


@dataclass
class _Calls:
    """Calls of one kind: first shapes, dimensions that varied, and the total time in seconds."""

    first: list[torch.Size | None]
    free: list[set[int]]
    seconds: float = 0.0

    def look(self, tensors: Sequence[Any]) -> None:
        """Record the sizes of another call."""
        for shape, dims, tensor in zip(self.first, self.free, tensors, strict=True):
            if shape is not None:
                dims |= {
                    dim
                    for dim, (was, now) in enumerate(zip(shape, tensor.shape, strict=True))
                    if was != now
                }


@dataclass
class Waiting:
    """The calls of one model that wait for a capture.

    A kind comprises all calls that differ only in tensor sizes.
    """

    _kinds: dict[Hashable, _Calls] = field(default_factory=dict)
    _now: _Calls | None = None

    def waits(self, kind: Hashable, tensors: Sequence[Any], capture_s: float) -> bool:
        """Return whether a call should use hooks.

        Args:
            kind: of the call.
            tensors: the flattened inputs; their numbers of dimensions are equal in all calls of a
                kind.
            capture_s: the time of a capture in seconds.
        """
        if kind not in self._kinds:
            if len(self._kinds) >= _KNOWN_KINDS:
                self._kinds.clear()
            shapes = [tensor.shape if isinstance(tensor, Tensor) else None for tensor in tensors]
            self._kinds[kind] = _Calls(shapes, [set() for _ in tensors])
        calls = self._kinds[kind]
        calls.look(tensors)
        self._now = calls if calls.seconds < capture_s else None
        if self._now is None:
            # if the capture does not cover later calls, they wait again
            calls.seconds = 0.0
        return self._now is not None

    def note(self, seconds: float) -> None:
        """Record the time of a call through hooks."""
        if self._now is not None:
            self._now.seconds += seconds
            self._now = None

    def free(self, kind: Hashable, tensors: Sequence[Any]) -> list[set[int]]:
        """Return for each input the dimensions that had several sizes."""
        calls = self._kinds.get(kind)
        return [set() for _ in tensors] if calls is None else calls.free

    def forget(self) -> None:
        """Discard all records, since the model has changed."""
        self._kinds.clear()
        self._now = None
