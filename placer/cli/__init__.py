"""The command ``placer``, the composition root: each command imports what it needs when it runs.

command.py          all commands, and errors as exit codes with the line of the user's code
profiling.py        profile, of several files and hosts too
solving.py          solve, solve-together, suggest
estimating.py       estimate
running.py          run
measuring.py        measure, refine
showing.py          show, compare
other_engines.py    export, evaluate
serving.py          serve
machine.py          doctor, demo, cache
option_fields.py    options made from options objects
options.py          options that several commands share, and readers of their words
model_arguments.py  a model and its inputs as words
files.py            JSON in and out
terminal.py         the streams, and the messages on stderr

This module imports only what loads at once: the imports of a command take a third of a second, and
Ctrl-C may come during them.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["ended_by_interrupts", "main"]

_STDERR = 2
"""The file descriptor; ``sys.stderr`` is replaced while a model is captured."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command; errors become one or two lines and an exit code.

    Args:
        arguments: the words of the command line; by default ``sys.argv``.
    """
    # the interpreter would look through all objects of torch for cycles, which takes a second
    atexit.register(gc.freeze)
    with ended_by_interrupts():
        from placer.cli.command import run

        run(arguments)


@contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Let Ctrl-C end the process wherever it is.

    Files and caches are written whole or not at all, so nothing is left half done. An exception
    would be lost in code that catches everything: some modules that torch imports do so, and then
    continue with half a module.
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
    # Show the cursor again, which a progress bar hides.
    shown = b"\x1b[?25h\n" if os.isatty(_STDERR) else b""
    os.write(_STDERR, shown + b"Aborted.\n")
    os._exit(128 + number)
