"""A lock under which one thread at a time traces or inspects a model's code.

Tracing changes classes, hooks and random number generators, which all threads share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Reentrant: a capture runs other traced functions, such as ``differs_later``.
_TRACING = threading.RLock()


def with_tracing_lock(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function hold the tracing lock while it runs."""

    @wraps(function)
    def in_turn(*args: P.args, **kwargs: P.kwargs) -> R:
        with _TRACING:
            return function(*args, **kwargs)

    return in_turn
