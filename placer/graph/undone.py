"""Parameters that forward itself writes to, such as a teacher that follows a student: a look writes them back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placer.graph.nested import run_under


@contextmanager
def written_back(model: nn.Module) -> Iterator[None]:
    """Give parameters that operations inside write to the values back that they had; only these are copied."""
    writes = _Writes(model)
    try:
        with writes:
            yield
    finally:
        for parameter, value in writes.before.values():
            parameter.data.copy_(value)


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies a parameter before the first operation that writes to it.

    Attributes:
        before: by storage, the parameter and what it was.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = {_key(parameter): parameter for parameter in model.parameters()}
        self.before: dict[int | None, tuple[Tensor, Tensor]] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let torch compile the branches of torch.cond under it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            return run_under(self, func, args, kwargs or {})
        if func._schema.is_mutable:
            for argument, given in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._keep(given)
        return func(*args, **(kwargs or {}))

    def _keep(self, given: Any) -> None:
        for tensor in tree_leaves(given):
            key = _key(tensor) if isinstance(tensor, Tensor) else None
            if key in self._parameters and key not in self.before:
                parameter = self._parameters[key]
                self.before[key] = parameter, parameter.detach().clone()


def _key(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # it has none: a sparse one
        return None
