"""Operations that fail at a chosen call, forwards or backwards, in whatever runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PHASES = {
    torch.ops.aten.hardtanh.default: "forward",
    torch.ops.aten.hardtanh_backward.default: "backward",
}
"""The operation that fails: hardtanh, so a model has one layer of it."""


class Faults(TorchDispatchMode):
    """Inside, hardtanh raises when it is told to.

    Attributes:
        calls: how often each phase ran since ``reset``.
        at: by phase and number of its call, from 0: what is raised then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.at: dict[tuple[str, int], Callable[[], BaseException]] = {}

    def reset(self) -> None:
        """No faults, and calls are counted from 0."""
        self.calls.clear()
        self.at.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        phase = PHASES.get(func)
        if phase is not None:
            fault = self.at.get((phase, self.calls[phase]))
            self.calls[phase] += 1
            if fault is not None:
                raise fault()
        return func(*args, **(kwargs or {}))
