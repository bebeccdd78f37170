"""Bound methods that do not keep their owner alive.

A slot calls a method of its stage, on itself. If the slot kept that method, stage and slot would
keep each other. Only Python's collection of cycles would then free their memory, and it does not
know when a device runs short.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, ref


def weakly(method: Callable[..., None], *things: Any) -> Callable[..., None]:
    """Return a bound method with first arguments, which keeps neither its owner nor these alive.

    It does nothing once the owner is gone.

    Args:
        method: of an object that others keep.
        things: its first arguments, which others keep as well.
    """
    found, references = WeakMethod(method), [ref(thing) for thing in things]

    def run(*rest: Any) -> None:
        whole = found()
        if whole is not None:
            whole(*(reference() for reference in references), *rest)

    return run
