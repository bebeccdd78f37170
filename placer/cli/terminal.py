"""What a command says on stderr beside its answer: spinners, errors, and which extra is missing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.markup import escape

from placer import errors

err = Console(stderr=True)


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Tell which extra is missing when an import fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = f"{error.name} is not installed: pip install 'torch-placer[{name}]'"
        raise errors.MissingExtraError(missing) from error


def spinner(text: str) -> Any:
    """A spinner while something runs, where stderr is a terminal."""
    return err.status(text) if sys.stderr.isatty() else nullcontext()


class _ToPeople(logging.Handler):
    """Log records as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one."""
        err.print(escape(record.getMessage()), soft_wrap=True, highlight=False)


@contextmanager
def told() -> Iterator[None]:
    """Tell what profiling warns of, and on a terminal also what it took from the cache."""
    log, handler = logging.getLogger("placer.profiler"), _ToPeople()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO if sys.stderr.isatty() else logging.WARNING)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
