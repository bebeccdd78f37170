"""Addition to all batch counters of a pass in one kernel.

Each training normalisation counts its batches. Starting one kernel per counter takes longer than
running them: 2% of ResNet-101's forward pass on an H100.
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

ADD_OPERATIONS = (torch.ops.aten.add_.Tensor, torch.ops.aten.add_.Scalar)
"""Operations that a captured graph uses to add to a counter."""


def batch_counters(layer: Layer, state: Sequence[Tensor]) -> list[Tensor]:
    """Return a layer's integer tensors that it uses only for counting.

    Args:
        layer: the layer.
        state: its tensors.
    """
    places = map(layer.state.index, layer.statistics)
    return [state[place] for place in places if state[place].dtype == torch.int64]


def added_together(counted: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Delay additions to counters until the end of the code inside; a single counter is left alone.

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
            func in ADD_OPERATIONS
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
