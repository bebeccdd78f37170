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


@contextmanager
def progress_bar(shown: Shown, total: int) -> Iterator[Step]:
    """Show a bar of ``total`` steps.

    Args:
        shown: whether and where.
        total: the number of steps; nothing is shown for none.

    Yields:
        What is called as each step begins, with its description.
    """
    if not total or not shown or not (shown == "always" or sys.stderr.isatty()):
        yield lambda _: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=shown != "always") as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def step(description: str) -> None:
            nonlocal begun
            bar.update(task, description=description[-40:], completed=begun)
            begun += 1

        yield step
        bar.update(task, completed=total)
