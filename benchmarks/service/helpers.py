"""Modules that the benchmark shares with the tests, from ``tests/helpers``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

HELPERS = Path(__file__).resolve().parents[2] / "tests" / "helpers"


def helper(name: str) -> ModuleType:
    """Return a module of the tests' helpers."""
    if str(HELPERS) not in sys.path:
        sys.path.append(str(HELPERS))
    return importlib.import_module(name)
