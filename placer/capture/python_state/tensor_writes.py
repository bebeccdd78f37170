"""Tensors that forward itself changes: they are given back what they had after the model ran for a
look.

A teacher that follows a student is written to. A library replaces the data of a quantised weight by
the layout that its kernels want, and what is attached to the weight with them.
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

_NONE = object()
_OPERATORS = {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}
_OF_ITSELF = {"requires_grad_", "detach_"}


@contextmanager
def written_back(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Give these tensors back the values that functions inside write to, and the data and
    attributes that they replace.

    A tensor is copied only if a function writes to it.
    """
    replaced = [_Held(tensor) for tensor in tensors]
    writes = _Writes(tensors)
    try:
        with writes:
            yield
    finally:
        for held in replaced:
            held.put_back()
        for tensor, value in writes.before.values():
            tensor.data.copy_(value)


class _Held:
    """What a tensor had: its data, and what its attributes and the objects among them held."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        # A wrapper has no data of its own: what it wraps is in its attributes.
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

    def put_back(self) -> None:
        """Give the tensor back what it had."""
        for holder, inside in self._contents.values():
            if isinstance(holder, list):
                holder[:] = inside.values()
                continue
            now = devices.contents(holder)
            for key, item in inside.items():
                if now.get(key, _NONE) is not item:
                    devices.put(holder, key, item)
            fields = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
            for key in (now.keys() - inside.keys()) & fields.keys():
                del fields[key]
        if self._data is not None and devices.memory_key(self._tensor) != devices.memory_key(
            self._data
        ):
            self._tensor.data = self._data


class _Writes(TorchFunctionMode):
    """Copies a tensor before the first function that writes to it.

    Attributes:
        before: by storage, the tensor and its values.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        # Of several views of one storage the largest.
        self._tensors = {storage_of(tensor): tensor for tensor in sorted(tensors, key=Tensor.numel)}
        self.before: dict[int | None, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_dynamo_compiling():
            if args and writes_to_its_first(getattr(func, "__name__", "")):
                self._keep(args[0])
            self._keep(kwargs.get("out"))
        return func(*args, **kwargs)

    def _keep(self, given: Any) -> None:
        for tensor in tree_leaves(given):
            key = storage_of(tensor) if isinstance(tensor, Tensor) else None
            if key is not None and key in self._tensors and key not in self.before:
                kept = self._tensors[key]
                self.before[key] = kept, kept.detach().clone()


def writes_to_its_first(name: str) -> bool:
    """Whether a function of this name writes to its first argument: ``add_``, ``+=`` and ``x[0] =
    y`` do.
    """
    if name.endswith("__"):
        return name == "__setitem__" or name in _OPERATORS
    return name.endswith("_") and name not in _OF_ITSELF


def storage_of(tensor: Tensor) -> int | None:
    """What tells the memory of a tensor from others'; None if it has no memory of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):
        # it has none: a sparse one, or one of a lazy module
        return None
