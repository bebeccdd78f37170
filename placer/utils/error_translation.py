"""Translation of errors without keeping the original alive, and their reasons as text."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, and of its first cause's if there is one.

    Lazy imports hide their reason behind several errors: a package names a class that it cannot
    import, and the first cause says why.
    """
    first = error
    # ``raise ... from None`` hides what happened before on purpose
    while earlier := first.__cause__ or (None if first.__suppress_context__ else first.__context__):
        first = earlier
    own, cause = _first_line(error), _first_line(first)
    return own if cause in own else f"{own} ({type(first).__name__}: {cause})"


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


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
