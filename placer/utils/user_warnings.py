"""Warnings located at the user's code, however deep in the library they arise."""

from __future__ import annotations

import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path


def _folders() -> tuple[str, ...]:
    """Return the folders of this package, of its client and of torch, whose modules call it."""
    places = [Path(__file__).parents[1]]
    for name in ("placer_client", "torch"):
        found = find_spec(name)
        if found is not None and found.origin is not None:
            places.append(Path(found.origin).parent)
    return tuple(f"{place}{os.sep}" for place in places)


def warn(message: str) -> None:
    """Issue a warning located at the nearest line outside this package, its client and torch.

    Args:
        message: the fact and the remedy.
    """
    inside, level = _folders(), 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*inside, "<")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
