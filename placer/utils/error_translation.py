"""One error raised for another, which is let go of as soon as nobody looks at it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class ErrorTranslation:
    """A context manager that raises, for an error inside it, what a function makes of that error.

    From Python 3.12 on, a generator under ``contextlib.contextmanager`` that raises another error
    than the one inside keeps that one in a reference cycle: the frame of contextlib that has thrown
    it into the generator has it as a variable, and the frames of its traceback lead to that frame.
    Only a garbage collection would free the tensors of all calls that the error has passed through,
    and no device that runs out of memory asks for one.

    Args:
        translate: from the error inside to the error to raise, its ``__cause__`` set; the same
            error goes on as it is.
    """

    def __init__(self, translate: Callable[[BaseException], BaseException]) -> None:
        self._translate = translate

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise the translated error, if there is one."""
        if error is None:
            return
        translated = self._translate(error)
        try:
            if translated is not error:
                raise translated
        finally:
            del error, translated  # the traceback of the one has this frame
