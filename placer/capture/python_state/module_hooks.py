"""Hooks of modules: a captured graph would not run what they do beside the tensors that they
change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod

from placer.errors import CaptureError

_SAFE_HOOKS = ("WeightNorm", "SpectralNorm", "RecomputeNorm", "Arrival", "Departure", "Again")
_SAFE_FUNCTIONS = ("output_capturing_hook", "make_inputs_require_grads")
"""Hooks of transformers: what the one collects is a part of the result, and the other serves
checkpoints."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_EVERY_MODULE = [getattr(torch.nn.modules.module, f"_global{kind}") for kind in _HOOKS]
"""Those that ``torch.nn.modules.module.register_module_forward_hook`` and its like put on every
module there is."""

_OURS = frozenset(
    {
        "placer.capture.export.checkpoints",
        "placer.capture.fingerprint",
        "placer.capture.export.module_names",
    }
)
"""Where hooks on every module come from that keep to the modules of one model."""


def refuse_hooks(module: nn.Module) -> None:
    """Raise a CaptureError if a module has hooks whose effects outside the graph would be lost."""
    if on_every_module():
        raise CaptureError(
            "every module has hooks (register_module_forward_hook), which a captured graph would not run"
        )
    for name, child in module.named_modules():
        for kind in _unsafe_hooks(child.__dict__):
            raise CaptureError(
                f"module {name or '(the model)'!r} has {kind.strip('_').replace('_', ' ')}, "
                "which a captured graph would not run"
            )


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Take the hooks away whose effects outside the graph nobody knows, and give them back
    afterwards.
    """
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


def on_every_module() -> bool:
    """Whether there are hooks on all modules of this process, beside those by which another thread
    is looking now.
    """
    return any(
        getattr(hook, "__module__", "") not in _OURS
        for hooks in _OF_EVERY_MODULE
        for hook in tuple(hooks.values())
    )


def modes(module: nn.Module) -> list[tuple[bool, bool]]:
    """Of every module, whether it trains, and whether it has hooks whose effects outside the graph
    would be lost.

    The last one is of no module, and says whether all have hooks. Every call of a flow asks for it,
    so it costs as little as can be: a module that is used twice is listed twice.
    """
    found, waiting = [], [module]
    while waiting:
        child = waiting.pop()
        fields = child.__dict__
        hooked = any(map(fields.get, _HOOKS)) and next(_unsafe_hooks(fields), None) is not None
        # Wrappers (torch.compile, torch.jit) have these as properties.
        found.append((fields["training"] if "training" in fields else child.training, hooked))
        inner = fields["_modules"] if "_modules" in fields else child._modules
        if inner:
            waiting += [module for module in inner.values() if module is not None]
    return [*found, (False, on_every_module())]


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
