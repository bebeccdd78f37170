"""Ctrl-C. What this imports is there at once: what commands need takes a third of a second, in
which it may come.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_STDERR = 2
"""The descriptor: what ``sys.stderr`` is changes while a model is captured."""


@contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Let Ctrl-C end the process wherever it is; what is written to files and caches is there whole
    or not at all.

    As an exception it is lost where code that it meets catches everything: some of what torch
    imports does, and then runs on with half a module.
    """
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: Any) -> None:
    # the cursor, which a progress bar hides
    shown = b"\x1b[?25h\n" if os.isatty(_STDERR) else b""
    os.write(_STDERR, shown + b"Aborted.\n")
    os._exit(128 + number)
