"""Random numbers of the host that a model's code draws while it is looked at: a graph would keep them, as numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def given_back() -> Iterator[list[str]]:
    """Give the generators of the host the states back that they had.

    Yields:
        What has been drawn or seeded inside, in words; complete afterwards.
    """
    drawn: list[str] = []
    python, torchs = random.getstate(), torch.default_generator.get_state()
    numpy: Any = sys.modules.get("numpy")
    numpys = None if numpy is None else numpy.random.get_state(legacy=False)
    try:
        yield drawn
    finally:
        if random.getstate() != python:
            drawn.append("draws from Python's random")
            random.setstate(python)
        if numpys is not None and not _equal(numpy.random.get_state(legacy=False), numpys):
            drawn.append("draws from numpy.random")
            numpy.random.set_state(numpys)
        if not torch.equal(torch.default_generator.get_state(), torchs):
            drawn.append("seeds torch's generator")
            torch.default_generator.set_state(torchs)


def _equal(state: Any, other: Any) -> bool:
    """Whether two states of numpy's generator are the same: tables in tables, with arrays."""
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(_equal(value, other[key]) for key, value in state.items())
    return bool(state.tolist() == other.tolist() if hasattr(state, "tolist") else state == other)
