"""One look at a model's code at a time: tracing stands on classes, hooks and generators that all
threads share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Found = TypeVar("Found")

_TRACING = threading.RLock()


def alone(look: Callable[Given, Found]) -> Callable[Given, Found]:
    """Let no other thread of this process be in a function of this kind."""

    @wraps(look)
    def in_turn(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        with _TRACING:
            return look(*args, **kwargs)

    return in_turn
