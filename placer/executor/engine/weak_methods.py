"""Methods that do not keep what they work on.

What a slot or a stage calls works on that slot or stage again. Were it kept by that, only Python's
search for cycles would free its memory once it is let go of, and that knows nothing of a device
that runs short.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, ref


def weakly(method: Callable[..., None], *things: Any) -> Callable[..., None]:
    """A bound method on these things, which keeps neither its owner nor them; without its owner it
    does nothing.

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
