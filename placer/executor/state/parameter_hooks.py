"""Hooks of parameters, which passes over aliases of the parameters would not run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter

from torch import Tensor, nn

from placer import devices

HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""Returns the hooks of a parameter, by kind."""


def has_hooks(parameter: Tensor) -> bool:
    """Return whether the user has hooks on a parameter; those that only look on do not count."""
    return any(
        not isinstance(hook, devices.Onlooker)
        for hooks in HOOKS(parameter)
        for hook in (hooks or {}).values()
    )


@contextmanager
def hooks_run_once(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Run the hooks of parameters after the backward passes inside, on the sums of the gradients.

    A hook that clamps or counts gradients would otherwise do so for every micro-batch. Existing
    gradients are added afterwards, as torch does.

    Args:
        parameters: without hooks of the user, they are left alone.
    """
    hooked = [one for one in parameters if has_hooks(one)]
    taken = [(kept, dict(kept)) for one in hooked for kept in HOOKS(one) if kept]
    before = [one.grad for one in hooked]
    sums: list[Tensor | None] = []
    for parameter in hooked:
        parameter.grad = None
    for kept, hooks in taken:
        for key, hook in hooks.items():
            if not isinstance(hook, devices.Onlooker):
                del kept[key]
    try:
        yield
        sums = [one.grad for one in hooked]
    finally:
        for kept, hooks in taken:
            kept.clear()
            kept.update(hooks)
        for parameter, gradient in zip(hooked, before, strict=True):
            parameter.grad = gradient
    # The backward pass of a leaf alone runs its hooks on the sum, and adds the result to the
    # gradient that it had before.
    for parameter, total in zip(hooked, sums, strict=True):
        if total is not None:
            parameter.backward(total)  # type: ignore[no-untyped-call]
