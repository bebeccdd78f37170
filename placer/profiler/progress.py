"""A progress bar on stderr, with the remaining time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from placer.utils.option_checks import require_flags

Shown = bool | Literal["always"]
"""True (if stderr is a terminal), ``"always"``, or False."""

Step = Callable[[str], None]
"""Called with a description when a step begins."""


class Bar:
    """A counter of begun steps or bytes, whose total may grow; shown once there are any.

    Args:
        progress: draws the bar; None draws nothing.

    Attributes:
        total: the number of known steps or bytes.
    """

    def __init__(self, progress: Progress | None) -> None:
        self.total = 0
        self._progress = progress
        self._task = None if progress is None else progress.add_task("", total=0)
        self._begun = 0

    def expect(self, steps: int) -> None:
        """Increase the total by a number of steps."""
        self.total += steps
        if self._progress is not None and self._task is not None and self.total:
            self._progress.update(self._task, total=self.total)
            # has no effect if it runs already
            self._progress.start()

    def __call__(self, description: str, size: int = 1) -> None:
        """Begin a step.

        Args:
            description: of the step.
            size: its share of the total.
        """
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=description[-40:], completed=self._begun)
        self._begun += size

    def finish(self) -> None:
        """Mark all steps as done."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self.total)


def require_shown(progress: Any) -> None:
    """Raise an InputError if ``progress`` is neither a flag nor ``"always"``.

    Raises:
        InputError: it is something else.
    """
    if progress != "always":
        require_flags(progress=progress)


@contextmanager
def progress_bar(
    shown: Shown, total: int = 0, unit: Literal["steps", "bytes"] = "steps"
) -> Iterator[Bar]:
    """Show a progress bar.

    Args:
        shown: whether and where.
        total: the number of steps or bytes known at the start.
        unit: of the total.

    Yields:
        A function to call with a description when a step begins.
    """
    if not shown or not (shown == "always" or sys.stderr.isatty()):
        yield Bar(None)
        return
    counts: tuple[ProgressColumn, ...] = (MofNCompleteColumn(),)
    if unit == "bytes":
        counts = DownloadColumn(binary_units=True), TransferSpeedColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=shown != "always")
    bar = Bar(progress)
    bar.expect(total)
    try:
        yield bar
        bar.finish()
    finally:
        progress.stop()
