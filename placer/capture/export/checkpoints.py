"""Detection of the modules that a model runs under ``torch.utils.checkpoint``.

A captured graph contains their operations, but not that they ran under a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import _StopRecomputationError

from placer.capture.python_state.attribute_reads import identity


@contextmanager
def recorded_checkpoints(module: nn.Module) -> Iterator[list[str]]:
    """Record the modules that run under a checkpoint, ignoring checkpoints around this.

    Args:
        module: the model.

    Yields:
        The paths of those modules: the outermost ones of each checkpoint.
    """
    names = {identity(child): name for name, child in module.named_modules()}
    found: list[str] = []

    def look(child: nn.Module, _: Any) -> None:
        # torch.compile traces a branch of torch.cond here, which is one operation.
        if torch.compiler.is_dynamo_compiling():
            return
        name = names.get(identity(child))
        if (
            name
            and name not in found
            and _under_checkpoint()
            and not any(name.startswith(f"{one}.") for one in found)
        ):
            found.append(name)

    handle = register_module_forward_pre_hook(look)
    try:
        with without_saved_tensor_hooks():
            yield found
    finally:
        handle.remove()


def is_recompute_signal(error: BaseException) -> bool:
    """Return whether an error is a checkpoint's signal that it has recomputed all that it needs."""
    return isinstance(error, _StopRecomputationError)


def _under_checkpoint() -> bool:
    """Return whether a non-reentrant checkpoint decides what autograd saves.

    A model with reentrant checkpoints is not captured.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def without_saved_tensor_hooks() -> AbstractContextManager[Any]:
    """Hide what autograd saves from the caller's hooks, such as a checkpoint's."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_identity, _identity)


def _identity(saved: Any) -> Any:
    return saved
