"""Hooks of parameters, which passes over aliases of the parameters would not run."""

from __future__ import annotations

from operator import attrgetter

from torch import nn

from placer import devices

HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""Returns the hooks of a parameter, by kind."""


def has_hooks(parameter: nn.Parameter) -> bool:
    """Return whether the user has hooks on a parameter; those that only look on do not count."""
    return any(
        not isinstance(hook, devices.Onlooker)
        for hooks in HOOKS(parameter)
        for hook in (hooks or {}).values()
    )
