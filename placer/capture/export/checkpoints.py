"""Which modules a model runs under ``torch.utils.checkpoint``; a captured graph shows their
operations and no more.
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
def noticed(module: nn.Module) -> Iterator[list[str]]:
    """Inside, the modules that run under a checkpoint are noticed; one around this is no business
    of theirs.

    Args:
        module: the model.

    Yields:
        The paths of those modules, the outermost of each checkpoint.
    """
    names = {identity(child): name for name, child in module.named_modules()}
    found: list[str] = []

    def look(child: nn.Module, _: Any) -> None:
        # a branch of torch.cond, say, which is one operation
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
        with unseen_by_hooks():
            yield found
    finally:
        handle.remove()


def is_over(error: BaseException) -> bool:
    """Whether a checkpoint ends what it runs again, by an error, as it has all that it needs."""
    return isinstance(error, _StopRecomputationError)


def _under_checkpoint() -> bool:
    """A checkpoint that is not reentrant decides what autograd saves; a reentrant one is not
    captured at all.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def unseen_by_hooks() -> AbstractContextManager[Any]:
    """In it the caller's hooks, a checkpoint's or others, see nothing of what autograd saves."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(saved: Any) -> Any:
    return saved
