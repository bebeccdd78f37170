"""The streams of a command, and its messages on stderr: spinners, errors, missing extras."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from typing import Any, TextIO, cast

from rich.console import Console
from rich.markup import escape

from placer import errors
from placer.utils.extras import extra as extra

err = Console(stderr=True, emoji=False)


class _Closed(io.StringIO):
    """A stand-in for a stream that was closed before the program began."""

    def read(self, size: int | None = -1, /) -> str:
        """Refuse to read."""
        raise errors.InputError("stdin is closed; name a file instead of -")

    def write(self, text: str, /) -> int:
        """Refuse to write."""
        raise errors.InputError(
            "stdout is closed; open it, or have the answer written to a file with -o"
        )


class _Output:
    """A stream of output, which may be a full disk or a pipe whose reader has left."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text."""
        with self._failures():
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        with self._failures():
            self._stream.flush()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise an InputError if an answer cannot be written, or a BrokenPipeError."""
        try:
            yield
        except OSError as error:
            # otherwise the interpreter would try to write the rest at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if isinstance(error, BrokenPipeError):
                raise
            raise errors.InputError(
                f"cannot write to stdout: {error.strerror}; send the output elsewhere"
            ) from error


class _Messages(_Output):
    """A stream of messages: those that cannot be written are lost, and the answer is not."""

    def _failures(self) -> Any:
        return suppress(OSError)


def settle_streams() -> None:
    """Set the encodings of the streams, and what happens if nothing can be written to them.

    Files and pipes are UTF-8 in every locale, as JSON is. A terminal keeps its own encoding, and
    shows a replacement for characters that it does not have.
    """
    sys.stdin, sys.stdout = sys.stdin or _Closed(), sys.stdout or _Closed()
    sys.stderr = sys.stderr or io.StringIO()
    for stream, otherwise in ((sys.stdin, "strict"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors=otherwise)
    if not isinstance(sys.stdout, _Output):  # by an earlier command of this process
        sys.stdout = cast(TextIO, _Output(sys.stdout))
        sys.stderr = cast(TextIO, _Messages(sys.stderr))


def spinner(text: str) -> Any:
    """Show a spinner while something runs, if stderr is a terminal."""
    return err.status(text) if sys.stderr.isatty() else nullcontext()


class _ToPeople(logging.Handler):
    """Log records as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one."""
        err.print(escape(record.getMessage()), soft_wrap=True, highlight=False)


@contextmanager
def profiling_log() -> Iterator[None]:
    """Show the warnings of profiling, and on a terminal also its use of the cache."""
    log, handler = logging.getLogger("placer.profiler"), _ToPeople()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO if sys.stderr.isatty() else logging.WARNING)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@contextmanager
def users_code() -> Iterator[None]:
    """Send the output of the user's code to stderr: stdout has the answer, maybe as JSON."""
    with redirect_stdout(sys.stderr):
        yield
