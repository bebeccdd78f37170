"""Which modules a model runs under ``torch.utils.checkpoint``; a captured graph shows their operations and no more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


@contextmanager
def noticed(module: nn.Module, *, reentrant: bool = False) -> Iterator[list[str]]:
    """Inside, the modules that run under a checkpoint are noticed.

    Args:
        module: the model.
        reentrant: whether what runs without gradients counts too, where there are gradients outside.

    Yields:
        The paths of those modules, the outermost of each checkpoint.
    """
    names = {id(child): name for name, child in module.named_modules()}
    found: list[str] = []
    reentrant = reentrant and torch.is_grad_enabled()

    def look(child: nn.Module, _: Any) -> None:
        if torch.compiler.is_dynamo_compiling():  # a branch of torch.cond, say, which is one operation
            return
        name = names.get(id(child))
        again = _under_checkpoint() or (reentrant and not torch.is_grad_enabled())
        if name and name not in found and again and not any(name.startswith(f"{one}.") for one in found):
            found.append(name)

    handle = register_module_forward_pre_hook(look)
    try:
        yield found
    finally:
        handle.remove()


def _under_checkpoint() -> bool:
    """A checkpoint that is not reentrant decides what autograd saves; a reentrant one is not captured at all."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
