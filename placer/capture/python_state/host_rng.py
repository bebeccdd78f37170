"""Random numbers of the host that a model's code draws while it is looked at: a graph would keep
them, as numbers.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

_PYTHONS = random.random.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of ``random``."""

_READS = frozenset(
    {"get_state", "getstate", "graphsafe_get_state", "clone_state", "initial_seed", "get_offset"}
)
"""What leaves a generator as it is."""


@contextmanager
def given_back(among_threads: bool = False) -> Iterator[list[str]]:
    """Give the generators of the host the states back that they had.

    Args:
        among_threads: other threads may draw meanwhile: what the code of this one does is watched,
            which makes it several times slower. (What numpy's generator is asked for cannot be.)

    Yields:
        What has been drawn or seeded inside, in words; complete afterwards.
    """
    drawn: list[str] = []
    python, torchs = random.getstate(), torch.default_generator.get_state()
    numpy: Any = sys.modules.get("numpy")
    numpys = None if numpy is None else numpy.random.get_state(legacy=False)
    used = [_PYTHONS, torch.default_generator]
    try:
        # else somebody's profiler is watching
        if among_threads and sys.getprofile() is None:
            used = []
            with _watched(used):
                yield drawn
        else:
            yield drawn
    finally:
        if random.getstate() != python and _PYTHONS in used:
            drawn.append("draws from Python's random")
            random.setstate(python)
        if numpys is not None and not _equal(numpy.random.get_state(legacy=False), numpys):
            drawn.append("draws from numpy.random")
            numpy.random.set_state(numpys)
        if (
            not torch.equal(torch.default_generator.get_state(), torchs)
            and torch.default_generator in used
        ):
            drawn.append("seeds torch's generator")
            torch.default_generator.set_state(torchs)


@contextmanager
def _watched(used: list[Any]) -> Iterator[None]:
    """Note which of the generators this thread's code uses."""

    def look(_: FrameType, event: str, function: Any) -> None:
        owner = getattr(function, "__self__", None) if event == "c_call" else None
        if (
            owner is _PYTHONS or owner is torch.default_generator
        ) and function.__name__ not in _READS:
            used.append(owner)

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def _equal(state: Any, other: Any) -> bool:
    """Whether two states of numpy's generator are the same: tables in tables, with arrays."""
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(
            _equal(value, other[key]) for key, value in state.items()
        )
    return bool(state.tolist() == other.tolist() if hasattr(state, "tolist") else state == other)
