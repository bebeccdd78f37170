"""Counts results of an operation that are alive at once."""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Alive(TorchDispatchMode):
    """Inside, the results of one operation are counted for as long as they live.

    Args:
        operation: an overload of ATen's.

    Attributes:
        now: how many are alive.
        most: how many were at once.
    """

    def __init__(self, operation: Any) -> None:
        super().__init__()
        self.now = self.most = 0
        self._operation = operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is self._operation:
            self.now += 1
            self.most = max(self.most, self.now)
            weakref.finalize(result.untyped_storage(), self._gone)
        return result

    def _gone(self) -> None:
        self.now -= 1
