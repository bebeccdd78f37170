"""Warnings that name the line of the user's code which led to them, however deep in the library
they arise.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path


def _folders() -> tuple[str, ...]:
    """Where code lies that is not the user's: this package, and torch, whose modules call it."""
    places = [Path(__file__).parents[1]]
    torch = find_spec("torch")
    if torch is not None and torch.origin is not None:
        places.append(Path(torch.origin).parent)
    return tuple(f"{place}{os.sep}" for place in places)


def warn(message: str) -> None:
    """Warn, as from the nearest line of code that is neither this package's nor torch's.

    Args:
        message: what is so, and the way out.
    """
    inside, level = _folders(), 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*inside, "<")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
