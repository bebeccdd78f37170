"""A progress bar with the time left, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Shown = bool | Literal["always"]
"""True: where stderr is a terminal; ``"always"``; or False."""

Step = Callable[[str], None]
"""Called when a step begins, with what it does."""


class Bar:
    """Steps that are counted as they begin; more may become known on the way. Nothing is shown
    before there are any.

    Args:
        progress: draws it; None where nobody looks.

    Attributes:
        total: the steps that are known of.
    """

    def __init__(self, progress: Progress | None) -> None:
        self.total = 0
        self._progress = progress
        self._task = None if progress is None else progress.add_task("", total=0)
        self._begun = 0

    def expect(self, steps: int) -> None:
        """So many steps more will come."""
        self.total += steps
        if self._progress is not None and self._task is not None and self.total:
            self._progress.update(self._task, total=self.total)
            self._progress.start()

    def __call__(self, description: str) -> None:
        """A step begins."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=description[-40:], completed=self._begun)
        self._begun += 1

    def finish(self) -> None:
        """All steps are done."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self.total)


@contextmanager
def progress_bar(shown: Shown, total: int = 0) -> Iterator[Bar]:
    """Show a bar.

    Args:
        shown: whether and where.
        total: the steps that are known of at the beginning.

    Yields:
        What is called as each step begins, with its description.
    """
    if not shown or not (shown == "always" or sys.stderr.isatty()):
        yield Bar(None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True), transient=shown != "always")
    bar = Bar(progress)
    bar.expect(total)
    try:
        yield bar
        bar.finish()
    finally:
        progress.stop()
