"""Hooks that a user registered on a flow, around calls of the model inside ``flow.applied()``.

    model(x) ──▶ pre-hooks of the flow ──▶ the call, placed ──▶ hooks of the flow

Torch runs hooks around a module's ``forward``. So such a call goes through the flow, whose
``forward`` asks ``call_of_model`` whether to run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from placer.errors import InputError

_call: ContextVar[Callable[..., Any] | None] = ContextVar("_call", default=None)


def run_with_hooks(flow: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a call of the model, with the hooks that are registered on the flow around it.

    Args:
        flow: whose ``forward`` runs the function that ``call_of_model`` returns.
        call: the function that runs the model.
        args: of the call.
        kwargs: of the call.

    Returns:
        The result of the call, as the hooks leave it.
    """
    if not any(_hooks_of(flow)):
        return call(*args, **kwargs)
    with _set(call):
        return flow(*args, **kwargs)


def refuse_hooks(flow: nn.Module, method: str) -> None:
    """Raise an InputError if hooks are registered on a flow: a method does not call it.

    Args:
        flow: the flow.
        method: name of the method.
    """
    if any(_hooks_of(flow)):
        raise InputError(
            f"the flow has hooks, and `flow.{method}` does not call the flow, so they would not "
            "run; register them on the model, `flow.module`"
        )


def _hooks_of(flow: nn.Module) -> tuple[Any, ...]:
    return (
        flow._forward_pre_hooks,
        flow._forward_hooks,
        flow._backward_pre_hooks,
        flow._backward_hooks,
    )


def call_of_model() -> Callable[..., Any] | None:
    """Return the function that ``run_with_hooks`` runs; None if the flow itself was called."""
    call = _call.get()
    if call is None:
        return None

    def run(*args: Any, **kwargs: Any) -> Any:
        with _set(None):  # inside, calls of the flow are its own
            return call(*args, **kwargs)

    return run


@contextmanager
def _set(call: Callable[..., Any] | None) -> Iterator[None]:
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)
