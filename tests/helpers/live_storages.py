"""Which of the storages that were made inside still live, and so take memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Notes every storage that an operation gives.

    Args:
        before: tensors whose storages are not counted.
    """

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()
        # they live: no other has their address
        self._before = [tensor.untyped_storage() for tensor in before]
        self._known = {storage._cdata for storage in self._before}
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known and key not in self._alive:
            self._alive[key] = (
                weakref.ref(storage, lambda _: self._alive.pop(key)),
                storage.nbytes(),
            )

    @property
    def bytes(self) -> int:
        """Of all that live."""
        return sum(size for _, size in self._alive.values())
