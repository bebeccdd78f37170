"""The time of ``placer demo`` after installation: what a new user waits for."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..record import row

TARGET_S = 180.0


def run() -> list[dict[str, Any]]:
    """Return the demo's time with an empty cache, as on the first run, and with a full one."""
    with _empty_cache() as environment:
        first, again = (_seconds(environment) for _ in range(2))
    return [
        row("placer demo", "start to end, the first time", "s", first, target=TARGET_S),
        row("placer demo", "start to end, again", "s", again, target=TARGET_S),
    ]


@contextmanager
def _empty_cache() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        yield os.environ | {"PLACER_CACHE": folder}


def _seconds(environment: dict[str, str]) -> float | None:
    """Return the demo's seconds, or None if it fails, as it does if a split model disagrees."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "placer", "demo"], env=environment, check=False
    )
    return time.perf_counter() - began if done.returncode == 0 else None
