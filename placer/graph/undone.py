"""Tensors that forward itself writes to, such as a teacher that follows a student: a look gives their values back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_OPERATORS = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
_OF_ITSELF = {"requires_grad_", "detach_"}


@contextmanager
def written_back(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Give these tensors back the values that they had. A tensor is copied only if a function inside writes to it."""
    writes = _Writes(tensors)
    try:
        with writes:
            yield
    finally:
        for tensor, value in writes.before.values():
            tensor.data.copy_(value)


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
    """Whether a function of this name writes to its first argument: ``add_``, ``+=`` and ``x[0] = y`` do."""
    if name.endswith("__"):
        return name == "__setitem__" or name in _OPERATORS
    return name.endswith("_") and name not in _OF_ITSELF


def storage_of(tensor: Tensor) -> int | None:
    """What tells the memory of a tensor from others'; None if it has no memory of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # it has none: a sparse one, or one of a lazy module
        return None
