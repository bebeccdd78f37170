"""Detection of host random numbers in a model's code.

A captured graph would contain the drawn numbers as constants.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

_PYTHON_GENERATOR = random.random.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of ``random``."""

_READING_METHODS = frozenset(
    {"get_state", "getstate", "graphsafe_get_state", "clone_state", "initial_seed", "get_offset"}
)
"""Methods that do not advance a generator."""


@contextmanager
def restored_generators(among_threads: bool = False) -> Iterator[list[str]]:
    """Restore the states of the host's generators afterwards.

    Args:
        among_threads: whether other threads may draw at the same time. This thread's code is then
            profiled, which makes it several times slower. numpy's generator cannot be watched in
            this way.

    Yields:
        Descriptions of what was drawn or seeded inside; complete afterwards.
    """
    drawn: list[str] = []
    python, torchs = random.getstate(), torch.default_generator.get_state()
    numpy: Any = sys.modules.get("numpy")
    numpys = None if numpy is None else numpy.random.get_state(legacy=False)
    used = [_PYTHON_GENERATOR, torch.default_generator]
    try:
        # Another profiler may be active, and there can be only one.
        if among_threads and sys.getprofile() is None:
            used = []
            with _watch_thread(used):
                yield drawn
        else:
            yield drawn
    finally:
        if random.getstate() != python and _PYTHON_GENERATOR in used:
            drawn.append("draws from Python's random")
            random.setstate(python)
        if numpys is not None and not _states_equal(numpy.random.get_state(legacy=False), numpys):
            drawn.append("draws from numpy.random")
            numpy.random.set_state(numpys)
        if (
            not torch.equal(torch.default_generator.get_state(), torchs)
            and torch.default_generator in used
        ):
            drawn.append("seeds torch's generator")
            torch.default_generator.set_state(torchs)


@contextmanager
def _watch_thread(used: list[Any]) -> Iterator[None]:
    """Record which of the generators this thread's code uses."""

    def look(_: FrameType, event: str, function: Any) -> None:
        owner = getattr(function, "__self__", None) if event == "c_call" else None
        if (
            owner is _PYTHON_GENERATOR or owner is torch.default_generator
        ) and function.__name__ not in _READING_METHODS:
            used.append(owner)

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def _states_equal(state: Any, other: Any) -> bool:
    """Return whether two states of numpy's generator are equal: nested dicts with arrays."""
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(
            _states_equal(value, other[key]) for key, value in state.items()
        )
    return bool(state.tolist() == other.tolist() if hasattr(state, "tolist") else state == other)
