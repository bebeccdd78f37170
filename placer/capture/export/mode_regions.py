"""Regions of a model's code that change how operations behave.

They are ``torch.no_grad()`` and ``torch.autocast``. The function of a layer enters and leaves them
itself.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

Region = tuple[Any, ...]
"""``("grad", enabled)`` or ``("autocast", device type, dtype, enabled, cache)``."""


class Regions:
    """The regions that are open while a layer runs.

    Leaving it after an exception closes the regions that are still open, and transforms of
    torch.func.

    Args:
        captured_on: the type of the capture's device.
    """

    def __init__(self, captured_on: str) -> None:
        self._captured_on = captured_on
        self._open: list[Any] = []
        self._depth = 0

    def __enter__(self) -> Regions:
        if not torch.compiler.is_compiling():
            self._depth = torch._C._functorch.get_dynamic_layer_stack_depth()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._open:
            leave_region(self)
        if kind is not None:
            torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(self._depth)

    def push(self, device: torch.device, region: Region) -> None:
        """Open a region; autocast for the capture's device type uses ``device``'s type."""
        # torch.compile can trace these functions; it breaks the graph where code enters a context
        # by hand.
        if region[0] == "grad":
            self._open.append(torch.is_grad_enabled())
            torch._C._set_grad_enabled(bool(region[1]))
            return
        kind = device.type if region[1] == self._captured_on else region[1]
        self._open.append(_enter_autocast(kind, region[2], bool(region[3]), region[4]))  # type: ignore[no-untyped-call]

    def pop(self) -> None:
        """Close the innermost region."""
        item = self._open.pop()
        if isinstance(item, bool):
            torch._C._set_grad_enabled(item)
        else:
            _exit_autocast(item)  # type: ignore[no-untyped-call]


def enter_region(regions: Regions, device: torch.device, *region: Any) -> None:
    """Open a region from inside a layer's code."""
    regions.push(device, region)


def leave_region(regions: Regions) -> None:
    """Close the innermost region from inside a layer's code."""
    regions.pop()
