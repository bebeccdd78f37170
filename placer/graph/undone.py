"""Parameters that forward itself writes to, such as a teacher that follows a student: a look writes them back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_OPERATORS = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
_OF_ITSELF = {"requires_grad_", "detach_"}


@contextmanager
def written_back(model: nn.Module) -> Iterator[None]:
    """Give parameters that functions inside write to the values back that they had; only these are copied."""
    writes = _Writes(model)
    try:
        with writes:
            yield
    finally:
        for parameter, value in writes.before.values():
            parameter.data.copy_(value)


class _Writes(TorchFunctionMode):
    """Copies a parameter before the first function that writes to it.

    Attributes:
        before: by storage, the parameter and what it was.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters = {_key(parameter): parameter for parameter in model.parameters()}
        self.before: dict[int | None, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_dynamo_compiling():
            if args and _writes_to_its_first(getattr(func, "__name__", "")):
                self._keep(args[0])
            self._keep(kwargs.get("out"))
        return func(*args, **kwargs)

    def _keep(self, given: Any) -> None:
        for tensor in tree_leaves(given):
            key = _key(tensor) if isinstance(tensor, Tensor) else None
            if key in self._parameters and key not in self.before:
                parameter = self._parameters[key]
                self.before[key] = parameter, parameter.detach().clone()


def _writes_to_its_first(name: str) -> bool:
    """Whether a function of this name writes to its first argument: ``add_``, ``+=`` and ``x[0] = y`` do."""
    if name.endswith("__"):
        return name == "__setitem__" or name in _OPERATORS
    return name.endswith("_") and name not in _OF_ITSELF


def _key(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # it has none: a sparse one, or one of a lazy module
        return None
