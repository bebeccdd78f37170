"""Hooks of modules, whose side effects a captured graph would lose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod

from placer.errors import CaptureError

# Class names of hooks that only compute weights, and of Placer's own hooks.
_SAFE_HOOKS = ("WeightNorm", "SpectralNorm", "RecomputeNorm", "Arrival", "Departure", "Again")
_SAFE_FUNCTIONS = ("output_capturing_hook", "make_inputs_require_grads")
"""Hooks of transformers: one collects a part of the result, the other prepares for checkpoints."""
_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HOOKS = (*_FORWARD_HOOKS, "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = [getattr(torch.nn.modules.module, f"_global{kind}") for kind in _HOOKS]
"""Hooks that ``register_module_forward_hook`` and similar functions put on every module."""

_PLACER_FILES = frozenset(
    {
        "placer.capture.export.checkpoints",
        "placer.capture.fingerprint",
        "placer.capture.export.module_names",
    }
)
"""Files of Placer whose hooks on every module ignore the modules of other models."""


def refuse_hooks(module: nn.Module) -> None:
    """Raise a CaptureError if a module has hooks with side effects that a graph would lose."""
    if has_global_hooks():
        raise CaptureError(
            "every module has hooks (register_module_forward_hook), which a captured graph would "
            "not run"
        )
    for name, child in module.named_modules():
        for kind in _unsafe_hooks(child.__dict__):
            raise CaptureError(
                f"module {name or '(the model)'!r} has {kind.strip('_').replace('_', ' ')}, "
                "which a captured graph would not run"
            )


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Remove hooks with side effects while inside."""
    taken = [
        (hooks, dict(hooks))
        for child in module.modules()
        for hooks in map(child.__dict__.get, _HOOKS)
        if hooks and not all(map(_is_safe, hooks.values()))
    ]
    for hooks, was in taken:
        for key, hook in was.items():
            if not _is_safe(hook):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, was in taken:
            hooks.clear()
            hooks.update(was)


def user_hooks(module: nn.Module) -> list[Any]:
    """Return the user's hooks that run in a forward pass, and may change its results."""
    return [
        hook
        for child in module.modules()
        for hooks in map(child.__dict__.get, _FORWARD_HOOKS)
        for hook in (hooks or {}).values()
        if not _is_safe(hook)
    ]


def has_global_hooks() -> bool:
    """Return whether hooks other than Placer's own are on all modules of this process."""
    return any(
        getattr(hook, "__module__", "") not in _PLACER_FILES
        for hooks in _GLOBAL_HOOKS
        for hook in tuple(hooks.values())
    )


def module_modes(module: nn.Module) -> list[tuple[bool, bool]]:
    """Return for every module whether it trains and whether it has hooks that a graph would lose.

    The last entry belongs to no module: whether every module has hooks. Each call of a flow asks
    for this, so it must be fast: a module that is used twice is listed twice.

    Args:
        module: the model.
    """
    found, waiting = [], [module]
    while waiting:
        child = waiting.pop()
        fields = child.__dict__
        hooked = any(map(fields.get, _HOOKS)) and next(_unsafe_hooks(fields), None) is not None
        # torch.compile's and torch.jit's wrappers have properties instead of these fields.
        found.append((fields["training"] if "training" in fields else child.training, hooked))
        inner = fields["_modules"] if "_modules" in fields else child._modules
        if inner:
            waiting += [module for module in inner.values() if module is not None]
    return [*found, (False, has_global_hooks())]


def _unsafe_hooks(fields: Mapping[str, Any]) -> Iterator[str]:
    for kind in _HOOKS:
        hooks = fields.get(kind)
        if hooks and not all(map(_is_safe, hooks.values())):
            yield kind


def _is_safe(hook: Any) -> bool:
    if type(hook).__name__ in _SAFE_HOOKS or isinstance(hook, BasePruningMethod):
        return True
    return (
        getattr(hook, "__name__", "") in _SAFE_FUNCTIONS
        and hook.__module__.partition(".")[0] == "transformers"
    )
