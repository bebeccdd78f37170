"""Translation of errors without keeping the original alive."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class ErrorTranslation:
    """A context manager that replaces an error inside it by the result of a function.

    From Python 3.12 on, a generator under ``contextlib.contextmanager`` that raises a different
    error keeps the original in a reference cycle: contextlib's frame holds the error, and the
    error's traceback leads to that frame. Only a garbage collection would then free the tensors of
    all calls in the traceback, and a device that runs out of memory does not trigger one.

    Args:
        translate: maps the original error to the error to raise, with its ``__cause__`` set; if it
            returns the original, that error propagates.
    """

    def __init__(self, translate: Callable[[BaseException], BaseException]) -> None:
        self._translate = translate

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise the translated error, if there is an error."""
        if error is None:
            return
        translated = self._translate(error)
        try:
            if translated is not error:
                raise translated
        finally:
            del error, translated  # their tracebacks refer to this frame
