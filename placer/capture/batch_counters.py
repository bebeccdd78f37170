"""Counters of batches, of which a normalisation that trains has one: all of a pass are counted on
in one kernel.

A kernel for each takes longer to start than to run. Of ResNet-101's forward pass on an H100 they
were 2%.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from placer.capture.layers import Layer

ADDITIONS = (torch.ops.aten.add_.Tensor, torch.ops.aten.add_.Scalar)
"""How a captured graph counts on."""


def counters(layer: Layer, state: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of whole numbers that a layer does nothing with but to count.

    Args:
        layer: the layer.
        state: its tensors.
    """
    places = map(layer.state.index, layer.statistics)
    return [state[place] for place in places if state[place].dtype == torch.int64]


def counted_together(counted: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Inside, what is added to counters waits until the end; a single one is left alone.

    Args:
        counted: the counters; nothing inside reads them.
    """
    return _CountTogether(counted) if len(counted) > 1 else nullcontext()


class _CountTogether(TorchFunctionMode):
    def __init__(self, counted: Sequence[Tensor]) -> None:
        super().__init__()
        self._counted = {id(tensor): tensor for tensor in counted}
        self._added: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in ADDITIONS
            and not kwargs
            and id(args[0]) in self._counted
            and isinstance(args[1], int)
        ):
            self._added[id(args[0])] = self._added.get(id(args[0]), 0) + args[1]
            return args[0]
        return func(*args, **(kwargs or {}))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        added, self._added = self._added, {}
        if error is None and added:
            with torch.no_grad():
                torch._foreach_add_([self._counted[key] for key in added], list(added.values()))
