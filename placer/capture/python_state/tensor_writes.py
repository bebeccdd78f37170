"""Restoration of tensors that forward itself changes, after a trial run.

A teacher model that follows a student is written to. Some libraries replace the data of a quantised
weight by the layout that their kernels need, and the tensors attached to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from placer import devices

_MISSING = object()
_INPLACE_OPERATORS = {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}
_FLAG_METHODS = {"requires_grad_", "detach_"}


@contextmanager
def restored_tensors(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore these tensors' values, data and attributes after the code inside.

    A tensor is copied only if a function writes to it.

    Args:
        tensors: the tensors to restore.
    """
    replaced = [_TensorContents(tensor) for tensor in tensors]
    writes = _CopyBeforeWrite(tensors)
    try:
        with writes:
            yield
    finally:
        for held in replaced:
            held.restore()
        for tensor, value in writes.before.values():
            tensor.data.copy_(value)


class _TensorContents:
    """A tensor's data, and the contents of its attributes and of the objects among them.

    Args:
        tensor: the tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        # A wrapper has no data of its own; the wrapped tensors are among its attributes.
        self._data = tensor.detach() if devices.has_own_memory(tensor) else None
        self._contents: dict[int, tuple[Any, dict[Any, Any]]] = {}
        self._note(vars(tensor))

    def _note(self, holder: Any, depth: int = 0) -> None:
        inside = devices.contents(holder)
        if not inside or id(holder) in self._contents or depth == devices.MAX_DEPTH:
            return
        if not isinstance(holder, tuple):
            self._contents[id(holder)] = holder, inside
        for item in inside.values():
            self._note(item, depth + 1)

    def restore(self) -> None:
        """Restore the tensor's data and attributes."""
        for holder, inside in self._contents.values():
            if isinstance(holder, list):
                holder[:] = inside.values()
                continue
            now = devices.contents(holder)
            for key, item in inside.items():
                if now.get(key, _MISSING) is not item:
                    devices.put(holder, key, item)
            # Names that forward added.
            fields = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
            for key in (now.keys() - inside.keys()) & fields.keys():
                del fields[key]
        if self._data is not None and devices.memory_key(self._tensor) != devices.memory_key(
            self._data
        ):
            self._tensor.data = self._data


class _CopyBeforeWrite(TorchFunctionMode):
    """A mode that copies a tensor before the first function that writes to it.

    Args:
        tensors: the tensors to copy when needed.

    Attributes:
        before: the tensor and its values, by storage.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        # Sorted by size, so that the largest of several views of one storage remains.
        self._tensors = {storage_id(tensor): tensor for tensor in sorted(tensors, key=Tensor.numel)}
        self.before: dict[int | None, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_dynamo_compiling():
            if args and writes_to_first_argument(getattr(func, "__name__", "")):
                self._keep(args[0])
            self._keep(kwargs.get("out"))
        return func(*args, **kwargs)

    def _keep(self, given: Any) -> None:
        for tensor in tree_leaves(given):
            key = storage_id(tensor) if isinstance(tensor, Tensor) else None
            if key is not None and key in self._tensors and key not in self.before:
                kept = self._tensors[key]
                self.before[key] = kept, kept.detach().clone()


def writes_to_first_argument(name: str) -> bool:
    """Return whether functions of this name write to their first argument.

    ``add_``, ``+=`` and ``x[0] = y`` do.

    Args:
        name: of a function.
    """
    if name.endswith("__"):
        return name == "__setitem__" or name in _INPLACE_OPERATORS
    return name.endswith("_") and name not in _FLAG_METHODS


def storage_id(tensor: Tensor) -> int | None:
    """Return an identifier of a tensor's memory; None if it has none of its own.

    Args:
        tensor: any tensor.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):
        # Sparse tensors and tensors of lazy modules have no memory of their own.
        return None
