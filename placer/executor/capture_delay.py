"""Calls that go through hooks until they have spent as long there as a capture takes.

So a few calls cost no capture, and many cost at most twice what they had to.
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
    """Calls of one kind: the shapes of the first, the dimensions of other sizes in later ones, and
    the time of all.
    """

    first: list[torch.Size | None]
    free: list[set[int]]
    seconds: float = 0.0

    def look(self, tensors: Sequence[Any]) -> None:
        """Note the sizes of one more."""
        for shape, dims, tensor in zip(self.first, self.free, tensors, strict=True):
            if shape is not None:
                dims |= {
                    dim
                    for dim, (was, now) in enumerate(zip(shape, tensor.shape, strict=True))
                    if was != now
                }


@dataclass
class Waiting:
    """The calls of one model that wait for a capture, by kind: what tells them apart but the sizes
    of tensors.
    """

    _kinds: dict[Hashable, _Calls] = field(default_factory=dict)
    _now: _Calls | None = None

    def waits(self, kind: Hashable, tensors: Sequence[Any], capture_s: float) -> bool:
        """Whether a call is to go through hooks.

        Args:
            kind: of call.
            tensors: the flattened inputs, of as many dimensions in all calls of a kind.
            capture_s: how long a capture takes.
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
            # should the capture be of no use to others, they wait anew
            calls.seconds = 0.0
        return self._now is not None

    def note(self, seconds: float) -> None:
        """A call went through hooks, and took so long."""
        if self._now is not None:
            self._now.seconds += seconds
            self._now = None

    def free(self, kind: Hashable, tensors: Sequence[Any]) -> list[set[int]]:
        """For each input, the dimensions that were of several sizes."""
        calls = self._kinds.get(kind)
        return [set() for _ in tensors] if calls is None else calls.free

    def forget(self) -> None:
        """The model is another one now."""
        self._kinds.clear()
        self._now = None
