"""The most bytes of tensors that live at one time on each stand-in, tensor by tensor."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placer import devices


class HeldBytes(TorchDispatchMode):
    """Counts the storages that are made inside, by the device that ``logical_devices`` knows each
    to be on.

    Args:
        before: tensors that are not counted.

    Attributes:
        peaks: the most bytes that were held at one time, by device; ``cpu`` where no stand-ins are.
    """

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        # they live: no other has their address
        self._before = [tensor.untyped_storage() for tensor in before]
        self._seen = {storage._cdata for storage in self._before}
        self._alive: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        self._held: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() != -1:
            self._count_as_freed(args[0])
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        place = str(devices.location(tensor))
        self._seen.add(key)
        self._alive[key] = (weakref.ref(storage, lambda _: self._end(key)), place, size)
        self._held[place] += size
        self.peaks[place] = max(self.peaks[place], self._held[place])

    def _end(self, key: int) -> None:
        _, place, size = self._alive.pop(key)
        self._seen.discard(key)
        self._held[place] -= size

    def _count_as_freed(self, tensor: Tensor) -> None:
        """Autograd adds gradients up in place, unless one is a part of something else, or a mode
        such as this is on."""
        key = tensor.untyped_storage()._cdata
        if key in self._alive and tensor.nbytes == tensor.untyped_storage().nbytes():
            reference, place, size = self._alive[key]
            self._held[place] -= size
            self._alive[key] = (reference, place, 0)
