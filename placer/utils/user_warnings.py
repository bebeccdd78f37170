"""Warnings located at the user's code, however deep in the library they arise."""

from __future__ import annotations

import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path


def _folders() -> tuple[str, ...]:
    """Return the folders of this package and of torch, whose modules call it."""
    places = [Path(__file__).parents[1]]
    torch = find_spec("torch")
    if torch is not None and torch.origin is not None:
        places.append(Path(torch.origin).parent)
    return tuple(f"{place}{os.sep}" for place in places)


def warn(message: str) -> None:
    """Issue a warning located at the nearest line outside this package and torch.

    Args:
        message: the fact and the remedy.
    """
    inside, level = _folders(), 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*inside, "<")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
