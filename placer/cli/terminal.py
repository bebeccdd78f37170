"""What a command says on stderr beside its answer: spinners, errors, and which extra is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console

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
